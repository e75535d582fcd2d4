"""A fleet in virtual time: the router's real decision code over replicas that only count."""
