"""Kvasir's own engine in torch, small enough to read in an evening."""
