"""What sends requests and records what became of each: Locust's leader and workers, and the replay."""
