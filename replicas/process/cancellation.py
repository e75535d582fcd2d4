"""Cancellation: a check for loops before each turn.

A library may swallow the CancelledError that was meant for its caller, as a connection's clean-up code does
if the cancellation comes while it waits. A loop that retries on errors would then run forever, and so would
the task that cancelled it.
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
