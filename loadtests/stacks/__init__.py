"""What load is sent to: clusters with and without Ray, single replicas, and a server with known delays."""
