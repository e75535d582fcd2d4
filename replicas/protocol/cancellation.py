"""One workaround, for tasks that loop over Redis calls."""

import asyncio


def raise_if_cancelled() -> None:
    """Raise CancelledError if the running task was cancelled and somebody ate it.

    Python 3.11's `asyncio.wait_for`, which the Redis client sends with, returns normally if it is
    cancelled in the moment in which it is done. The cancellation is lost, and a loop would never end;
    but the task still counts it.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
