"""Grammars: what an engine's answers are held to, token by token, by llguidance."""
