"""The decision: which replica a prompt goes to, and why."""
