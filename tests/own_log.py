"""What our own code has logged in a test. Owns which loggers that means: others, such as asyncio's, also
speak of what an earlier test left behind, as of a gRPC event that finds its event loop closed."""

import logging

import pytest

OWN = ("cluster", "loadtests", "replicas", "router")


def own_records(caplog: pytest.LogCaptureFixture, level: int) -> list[logging.LogRecord]:
    """The records of our own loggers at `level` or above, in their order."""
    return [item for item in caplog.records if item.name.partition(".")[0] in OWN and item.levelno >= level]
