"""The published contract of replicas, router and index: all of `replicas` that others import."""
