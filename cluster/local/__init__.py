"""Everything that `kvasir up` runs on one machine, from Redis to the router."""
