"""The published contract between replicas, router and index: the only part of `replicas` that others import."""
