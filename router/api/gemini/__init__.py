"""Gemini's API: how a body is read and an answer written, its models and its caches."""
