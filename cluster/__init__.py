"""Keeps the fleet as specified, in Ray; and the `kvasir` command."""
