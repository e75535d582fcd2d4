"""Metrics of a replica for Prometheus, and the spans of its requests."""
