"""`python -m loadtests.named.kill_replica RUN_DIR [all]`: what goes wrong in load tests that kill replicas.

Owns the choice: of the replicas that are ready, the one that has run longest, so that one after another has
its turn; or all of them. They are killed with SIGKILL, as by a machine that fails.
"""

import os
import signal
import sys
from pathlib import Path

import psutil

from cluster.local.run_directory import RunDirectory
from replicas.protocol.status import ReplicaState


def main(path: Path, *, kills_all: bool = False) -> int:
    """0 if one was killed."""
    state = RunDirectory(path).read_state()
    ready = {} if state is None else {each.pid: each for each in state.replicas if _is_ready(each.state)}
    started = {pid: psutil.Process(pid).create_time() for pid in ready if pid and psutil.pid_exists(pid)}
    if not started:
        print(f"no replica of {path} is ready", file=sys.stderr)
        return 1
    victims = started if kills_all else [min(started, key=lambda pid: started[pid])]
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    print(", ".join(f"killed {ready[victim].replica_id}, process {victim}" for victim in victims))
    return 0


def _is_ready(state: str) -> bool:
    return state == ReplicaState.READY.value


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), kills_all=sys.argv[2:] == ["all"]))
