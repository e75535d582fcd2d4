"""Lint: where the prompts of a log break their prefixes, what that costs, and what to do about it."""
