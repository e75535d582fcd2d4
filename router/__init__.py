"""The front door that knows where prefixes live."""
