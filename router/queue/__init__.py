"""Decides who is served next in an overload."""
