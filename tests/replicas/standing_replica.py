"""A replica process whose engine holds Python's lock in one request's step, as compiled code may.

python -m tests.replicas.standing_replica REPLICA_FLAGS
"""

import ctypes
import functools
import os
import sys

import replicas.__main__ as process
from replicas.host import ReplicaHost
from replicas.protocol.frames import StepFrame
from tests.replicas.scripted_engine import ScriptedEngine
from tests.replicas.whole_replica import scripted

STANDING_TOKENS = 77
"""A request for this many holds the lock."""

LOCKED = ctypes.PyDLL(None)
"""Its functions are called without letting go of the lock."""


class StandingEngine(ScriptedEngine):
    def step(self) -> StepFrame:
        if any(request.sampling.max_tokens == STANDING_TOKENS for request in self.added):
            stand_still()
        return super().step()


def stand_still() -> None:
    LOCKED.sleep(600)


if __name__ == "__main__":
    process.ReplicaHost = functools.partial(  # type: ignore[assignment,misc]
        ReplicaHost, build=scripted(StandingEngine())
    )
    os._exit(process.main(sys.argv[1:], os.environ))
