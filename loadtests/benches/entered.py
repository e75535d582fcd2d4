"""Counts the functions and files of the router that one streamed chat enters.

A router and one simulated replica run as usual; a profile hook in the router notes each Python function that
is called. Counted is one chat of eight answer tokens with a system prompt that was served before. Functions
that an idle router enters as well are left out.

    python -m loadtests.benches.entered
    python -m loadtests.benches.entered --under router/explain      lists the functions there
"""

import asyncio
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType

from loadtests.benches.harness import bench_options
from loadtests.benches.router import REPLICA, PromptMix, bodies, closed_loop
from loadtests.stacks.local_stack import LocalStack, local_stack

COUNTS = "KVASIR_ENTERED_COUNTS"
"""Environment variable that names the file to which a counting router writes."""
PACKAGE = f"{os.sep}router{os.sep}"
WORKLOAD = PromptMix("a shared system prompt", 1, 400, 8)
NUM_WARM_UP, OUTPUT_TOKENS, IDLE_SECONDS = 4, 8, 3.0
REPLY_SECONDS = 10.0
SETTLE_SECONDS = 0.5
"""A request is counted in the metrics after its last byte has been sent."""


def main(arguments: Sequence[str]) -> None:
    parser = bench_options(__doc__)
    parser.add_argument("--under", metavar="PREFIX", help="also list the functions of files that begin so")
    options = parser.parse_args(arguments)
    with local_stack(replica_settings=REPLICA) as stack:
        entered = _entered_by_a_chat(stack)
    files = {name.partition(":")[0] for name in entered}
    print(f"{len(entered)} functions in {len(files)} files, {sum(entered.values())} calls")
    rooms = Counter(_room_of(name) for name in entered)
    files_of = Counter(_room_of(file) for file in files)
    for room, number in rooms.most_common():
        print(f"{number:5} in {files_of[room]:2} files of {room}")
    for name in sorted(entered) if options.under else ():
        if name.startswith(options.under):
            print(f"{entered[name]:5} {name}")


def _room_of(name: str) -> str:
    return "/".join(name.partition(":")[0].split("/")[:2])


def _entered_by_a_chat(stack: LocalStack) -> Mapping[str, int]:
    counts = stack.run_directory / "entered.json"
    command = stack.command("router")
    settings = command[command.index("router") + 1 :]
    stack.terminate("router")
    counting = [sys.executable, "-m", "loadtests.benches.entered", "--router", *settings]
    checkout = Path(__file__).parents[2]
    stack.start("router", ["env", f"{COUNTS}={counts}", f"PYTHONPATH={checkout}", *counting])
    stack.wait_ready(1)
    requests = bodies(WORKLOAD, NUM_WARM_UP + 1, stream=True, max_tokens=OUTPUT_TOKENS, seed=0)
    asyncio.run(closed_loop(stack, requests[:-1], 1))
    time.sleep(SETTLE_SECONDS)
    pid = stack.pid("router")
    os.kill(pid, signal.SIGUSR1)
    time.sleep(IDLE_SECONDS)
    idle = _counts(pid, counts)
    os.kill(pid, signal.SIGUSR1)
    asyncio.run(closed_loop(stack, requests[-1:], 1))
    time.sleep(SETTLE_SECONDS)
    chat = _counts(pid, counts)
    return {name: number for name, number in chat.items() if name not in idle}


def _counts(pid: int, counts: Path) -> Mapping[str, int]:
    """Calls by function since the router was told to begin."""
    counts.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR2)
    for _ in range(int(REPLY_SECONDS / 0.05)):
        time.sleep(0.05)
        if counts.exists():
            found: dict[str, int] = json.loads(counts.read_text())
            return found
    raise TimeoutError("the router wrote no counts")


def count_in_router(settings: Sequence[str]) -> None:
    """Be a router that counts: SIGUSR1 begins, SIGUSR2 writes the file."""
    calls: Counter[CodeType] = Counter()
    out = Path(os.environ[COUNTS])

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and PACKAGE in frame.f_code.co_filename:
            calls[frame.f_code] += 1

    def write(*_: object) -> None:
        named: Counter[str] = Counter()
        for code, number in list(calls.items()):
            named[f"router/{code.co_filename.rpartition(PACKAGE)[2]}:{code.co_qualname}"] += number
        part = out.with_suffix(".part")
        part.write_text(json.dumps(named))
        part.rename(out)

    signal.signal(signal.SIGUSR1, lambda *_: calls.clear())
    signal.signal(signal.SIGUSR2, write)
    threading.setprofile(note)
    sys.setprofile(note)
    sys.argv = ["router", *settings]
    runpy.run_module("router", run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--router"]:
        count_in_router(sys.argv[2:])
    else:
        main(sys.argv[1:])
