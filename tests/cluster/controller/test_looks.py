import asyncio
import logging

import pytest

from cluster.controller.looks import repeat
from tests.own_log import own_records


class Said:
    def __init__(self) -> None:
        self.complaints: list[str | None] = []

    async def __call__(self, what: str, complaint: str | None) -> None:
        assert what == "machines"
        self.complaints.append(complaint)


async def test_a_look_is_repeated_whatever_came_of_it(caplog: pytest.LogCaptureFixture) -> None:
    said, looks = Said(), 0

    async def look() -> str | None:
        nonlocal looks
        looks += 1
        if looks in (2, 3):
            raise KeyError("two\nlines")
        if looks == 4:
            raise RuntimeError
        if looks == 5:
            return "it is dark"
        if looks == 7:
            raise asyncio.CancelledError
        return None

    with pytest.raises(asyncio.CancelledError):
        await repeat("machines", look, 0, said)
    failed = "the look at machines failed: "
    assert said.complaints == [
        *(None, failed + r"'two\nlines'", failed + r"'two\nlines'", failed + "RuntimeError()"),
        *("it is dark", None),
    ]
    told = [record for record in own_records(caplog, logging.INFO) if record.exc_info]
    assert len(told) == 2, "the same is logged once"
