"""repeat(): what the controller does over and over beside its plan, whatever happens to it.

Owns what becomes of a look that fails: it is logged, reported, and followed by the next one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

logger = logging.getLogger(__name__)

Complain = Callable[[str, str | None], Awaitable[None]]
"""Takes what was looked at, and what is wrong with it; None once nothing is any more."""


async def repeat(
    what: str, look: Callable[[], Awaitable[str | None]], seconds: float, complain: Complain
) -> NoReturn:
    """Look, hand on the complaint that the look came back with, wait, look again; until cancelled."""
    failure: str | None = None
    while True:
        try:
            complaint = await look()
            failure = None
        except Exception as error:  # of any kind: the next look may succeed
            complaint = f"the look at {what} failed: {' '.join((str(error) or repr(error)).split())}"
            if complaint != failure:
                logger.exception("the look at %s failed", what)
            failure = complaint
        await complain(what, complaint)
        await asyncio.sleep(seconds)
