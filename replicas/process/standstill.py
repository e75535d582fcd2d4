"""end_on_standstill(): ends a process whose event loop has not run for long, for any reason.

An engine's step that holds Python's lock stops every thread of its process, including watchdogs. A C thread
that needs no lock (`faulthandler`) ends the process; the event loop postpones it again and again. It prints
every thread's position.
"""

import asyncio
import contextlib
import faulthandler
from collections.abc import AsyncIterator

PUT_OFF_PER_LIMIT = 8

STANDARD_ERROR = 2


@contextlib.asynccontextmanager
async def end_on_standstill(seconds: float, descriptor: int = STANDARD_ERROR) -> AsyncIterator[None]:
    """While inside. A process has one such switch, so only its edge turns it on. It ends with status 1."""

    async def put_off() -> None:
        while True:
            faulthandler.dump_traceback_later(seconds, exit=True, file=descriptor)
            await asyncio.sleep(seconds / PUT_OFF_PER_LIMIT)

    task = asyncio.create_task(put_off(), name="standstill")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        faulthandler.cancel_dump_traceback_later()
