"""Pulls chunks from other replicas' host memory, and serves them its own."""
