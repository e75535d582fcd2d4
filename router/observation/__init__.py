"""A router's metrics, spans and access log."""
