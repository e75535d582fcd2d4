"""repeat(): runs the controller's periodic looks, and survives their failures.

A failing look is logged, reported, and followed by the next.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

logger = logging.getLogger(__name__)

Complain = Callable[[str, str | None], Awaitable[None]]
"""Takes the name of a look and its problem; None once there is none."""


async def repeat(
    what: str, look: Callable[[], Awaitable[str | None]], seconds: float, complain: Complain
) -> NoReturn:
    """Look, report the returned complaint, wait, repeat; until cancelled."""
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
