"""Both clocks of a router, which a test moves on."""

import pytest

NOON = 1_800_000_000.0


class Times:
    def __init__(self) -> None:
        self.passed = 0.0

    def wall(self) -> float:
        return NOON + self.passed

    def now(self) -> float:
        return self.passed


@pytest.fixture
def times() -> Times:
    return Times()
