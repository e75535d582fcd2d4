"""Senders of requests and records of their outcomes: Locust's leader and workers, and the replay."""
