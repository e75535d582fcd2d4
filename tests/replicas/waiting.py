"""Waiting in tests of replicas. How long is the test's own limit."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.005)
