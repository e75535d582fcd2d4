"""Orders on standard input to a process whose instructions are counted.

Owns the order of things: what an order needs is made, the process says `ready`, waits for a line, does it and
says `done`. So only the doing is counted.
"""

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

Action: TypeAlias = Callable[[], Awaitable[None]]


async def follow_orders(prepare: Callable[[Sequence[str]], Awaitable[Action]]) -> None:
    """Until the input ends. `prepare` gets the words of an order."""
    for line in iter(sys.stdin.readline, ""):
        act = await prepare(line.split())
        print("ready", flush=True)
        sys.stdin.readline()
        await act()
        print("done", flush=True)
