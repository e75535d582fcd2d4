"""Gemini's API: how a body is read and an answer written, and its models."""
