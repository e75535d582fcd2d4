"""A loop ends when it is cancelled, even where a library has swallowed the CancelledError."""

import asyncio
import contextlib

import pytest

from replicas.process.cancellation import is_cancelled, raise_if_cancelled


async def turn_that_swallows() -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)


async def test_the_next_turn_notices_a_cancellation_that_was_swallowed() -> None:
    num_turns = 0

    async def loop() -> None:
        nonlocal num_turns
        while True:
            raise_if_cancelled()
            num_turns += 1
            await turn_that_swallows()

    task = asyncio.create_task(loop())
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert num_turns == 1


async def test_a_timeout_that_has_passed_is_no_cancellation() -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.001):
            await asyncio.sleep(60)
    assert not is_cancelled()
    raise_if_cancelled()
