"""Leases: how long a prefix is to be kept, and what became of each promise."""
