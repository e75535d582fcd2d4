"""What a replica tells of itself: metrics for Prometheus, and the spans of its requests."""
