"""Chunks from other replicas: what is read from their host memory, and what they may read here."""
