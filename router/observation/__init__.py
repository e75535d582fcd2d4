"""What a router tells of itself: metrics, spans, the access log, and what it has seen lately."""
