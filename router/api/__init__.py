"""The HTTP API: the core that all dialects share, with a folder for each of them."""
