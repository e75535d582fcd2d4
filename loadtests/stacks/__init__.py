"""Targets of load: clusters with and without Ray, single replicas, and a server with known delays."""
