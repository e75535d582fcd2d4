"""Anthropic's Messages: how a body is read and an answer written, and the routes beside."""
