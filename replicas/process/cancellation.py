"""Cancellation: what a loop asks before it begins another turn.

A library may catch the CancelledError that was meant for its caller: clean-up code of a connection does, if
the cancellation comes while it waits. A loop that retries on errors would then go on for ever, and the task
that cancelled it would wait as long.
"""

import asyncio


def is_cancelled() -> bool:
    """Whether the current task was cancelled, even if the CancelledError has been swallowed."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling() > 0


def raise_if_cancelled() -> None:
    """For the beginning of a turn. Raises CancelledError."""
    if is_cancelled():
        raise asyncio.CancelledError
