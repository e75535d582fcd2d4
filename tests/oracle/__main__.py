"""`python -m tests.oracle`: records what a checkout does for its clients, and compares two recordings.

    python -m tests.oracle record NEW                      this checkout
    python -m tests.oracle record OLD --checkout ../old    another one, such as a worktree of an old commit
    python -m tests.oracle compare OLD NEW                 exits with 1, and prints what differs
    python -m tests.oracle write                           writes `recording.json`, which a test compares with

Record both with the same version of this package: it owns what is asked. The other checkout needs no
environment of its own. `--only GROUP` records the groups whose names begin so. What earlier groups leave in
caches is then missing, so record both sides with it.

Recorded are some 7,000 requests and their whole answers, at a router with keys and at one without, over
sockets, with real replicas of simulated engines and a real Redis. Beside them: the kinds of writes to Redis,
and what lies there in the end, opened; what the processes counted; where the requests of generated traces go;
figures of fleets in virtual time; the names of metrics, settings and commands.

Replaced is what differs by itself: ids by where they appeared first, times by their distance from now,
ports, durations and what is left of a limit by time, the number in `x-kvasir-overlap-tokens` unless it is
0, in Redis epochs, writers' names and measured speeds. Changes of the index are merged, and the events of
several prompts in one stream are sorted. Of `/metrics` and the live page the names, labels and types of
fields are recorded, and the counters that do not depend on the moment.
"""

import argparse
import difflib
import hashlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.oracle.cluster import cluster
from tests.oracle.exchanges import Talk
from tests.oracle.features import groups
from tests.oracle.names import names, simulated
from tests.oracle.redis_record import Writes, contents
from tests.oracle.traces import decisions

LEAST_SECONDS_IN_HOUR = 120.0
RECORDING = Path(__file__).with_name("recording.json")
"""Digests of answers, by group and label."""
ANSWERS = (
    *("caches", "chat", "completions", "conversations", "counts", "explained", "gemini", "heads", "messages"),
    *("refused", "responses", "routes", "stored", "tenant-"),
)
"""Groups of requests whose answers depend on nothing but the code."""


def record(folder: Path, checkout: Path, only: Sequence[str]) -> None:
    folder.mkdir(parents=True)
    began = time.monotonic()

    def say(what: str) -> None:
        sys.stderr.write(f"{time.monotonic() - began:6.1f} s  {what}\n")

    def is_wanted(name: str) -> bool:
        return not only or name.startswith(tuple(only))

    if is_wanted("names"):
        _write(folder / "names.json", names(checkout))
        say("names")
    with tempfile.TemporaryDirectory() as temporary:
        with cluster(Path(temporary), checkout) as running:
            say("cluster")
            _wait_for_room_in_hour()
            writes = Writes(running.redis_url)
            with writes.watching():
                for name, who, headers, ask in groups():
                    if is_wanted(name):
                        with Talk(running.urls[who], folder / f"{name}.json", headers) as talk:
                            ask(talk)
                        say(name)
                if is_wanted("decisions"):
                    _write(folder / "decisions.json", decisions(running.urls["open"]))
                    say("decisions")
                for router in ("open", "keyed"):
                    running.end(router)
                _write(folder / "redis.json", contents(running.redis_url))
            _write(folder / "writes.json", {"kinds": writes.kinds})
            say("redis")
        if is_wanted("simulated"):
            _write(folder / "simulated.json", simulated(checkout, Path(temporary)))
            say("simulated")


def _wait_for_room_in_hour() -> None:
    """What is used is counted by the hour, and a recording that has two of them equals no other."""
    left = 3600 - time.time() % 3600
    if left < LEAST_SECONDS_IN_HOUR:
        time.sleep(left + 1)


def _write(path: Path, content: dict[str, str]) -> None:
    path.write_text(json.dumps(content, indent=0, ensure_ascii=False), "utf-8")


def compare(old: Path, new: Path) -> int:
    """How many entries differ. Of those in which the same lines changed the first is printed."""
    alike: dict[frozenset[str], list[str]] = {}
    printed: list[str] = []
    for name in sorted({path.name for folder in (old, new) for path in folder.glob("*.json")}):
        before, after = _read(old / name), _read(new / name)
        for label in [*before, *(label for label in after if label not in before)]:
            texts = [found.get(label, "").splitlines() for found in (before, after)]
            if texts[0] == texts[1]:
                continue
            title = f"{name.removesuffix('.json')}: {label}"
            lines = list(difflib.unified_diff(texts[0], texts[1], title, title, n=2, lineterm=""))
            others = alike.setdefault(frozenset(line for line in lines[2:] if line[0] in "+-"), [])
            if not others:
                printed += lines
            others.append(title)
    for others in alike.values():
        if others[1:]:
            printed.append(f"\nas {others[0]}:\n  " + "\n  ".join(others[1:]))
    sys.stdout.write("".join(f"{line}\n" for line in printed))
    return sum(map(len, alike.values()))


def digests(folder: Path) -> dict[str, dict[str, str]]:
    """Return a digest of each request with its answer in a recording, by group and label."""
    return {
        path.stem: {
            label: hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
            for label, text in _read(path).items()
        }
        for path in sorted(folder.glob("*.json"))
        if path.stem.startswith(ANSWERS)
    }


def write() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        record(Path(temporary) / "new", Path.cwd(), ANSWERS)
        written = json.dumps(digests(Path(temporary) / "new"), indent=0, ensure_ascii=False)
        RECORDING.write_text(f"{written}\n", "utf-8")


def _read(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--checkout", type=Path, default=Path.cwd())
    recording.add_argument("--only", action="append", default=[], metavar="GROUP")
    commands.add_parser("write")
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that its processes end, too
    if arguments.command == "write":
        write()
        return 0
    if arguments.command == "record":
        record(arguments.folder, arguments.checkout.resolve(), arguments.only)
        return 0
    count = compare(arguments.old, arguments.new)
    sys.stdout.write(f"{count} entries differ\n" if count else "equal\n")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
