"""A router's metrics, spans, access log, and record of recent requests."""
