"""Shared by engines: which requests are admitted, what the next step computes, which blocks they hold."""
