"""The HTTP API: one file for each dialect, and what they share."""
