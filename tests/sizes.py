"""Sizes: the lines of Python of every room and of its tests, next to `sizes.json`, which bounds them.

python -m tests.sizes                      rooms that differ from the file
python -m tests.sizes --write "REASON"     the file anew; each room that grew keeps the reason
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TypeAlias, TypedDict

from docs.make_file_map import PACKAGES, ROOT, tracked_files

FILE = Path(__file__).with_suffix(".json")
FAR_BELOW = 50
"""Lines below its number at which a room is to be written down."""


class Room(TypedDict):
    """Most lines of a room, and of its tests; a line for each time that they were raised, and what for."""

    code: int
    tests: int
    raised: list[str]


Sizes: TypeAlias = dict[str, Room]


def room_of(name: str) -> tuple[str, str]:
    """Return a file's room, and whether it is `code` or `tests`. Tests belong to the room they mirror."""
    kind, parts = "code", name.split("/")
    if parts[0] == "tests" and len(parts) > 2:
        kind, parts = "tests", parts[1:]
        if parts[0] not in PACKAGES:
            parts = [parts[0], ""]
    depth = 2 if parts[0] in PACKAGES and len(parts) > 2 else 1
    return "/".join(parts[:depth]), "tests" if parts[0] == "tests" else kind


def count() -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for name in tracked_files():
        if name.endswith(".py"):
            room, kind = room_of(name)
            num_lines = (ROOT / name).read_text(encoding="utf-8").count("\n")
            found.setdefault(room, Counter())[kind] += num_lines
    return found


def read() -> Sizes:
    sizes: Sizes = json.loads(FILE.read_text(encoding="utf-8"))
    return sizes


def differences(sizes: Sizes, found: dict[str, Counter[str]], least: int) -> list[str]:
    """Return a line for each number that is passed, or that is `least` lines above what there is."""
    lines = []
    for room in sorted(sizes.keys() | found.keys()):
        bounds, counts = sizes.get(room, Room(code=0, tests=0, raised=[])), found.get(room, Counter())
        for kind, most in (("code", bounds["code"]), ("tests", bounds["tests"])):
            if counts[kind] > most or most - counts[kind] >= least:
                lines.append(f"{room}: {kind} {most:,} -> {counts[kind]:,} ({counts[kind] - most:+,})")
    return lines


def write(reason: str) -> None:
    old, sizes = read() if FILE.exists() else {}, Sizes()
    for room, counts in sorted(count().items()):
        bounds = old.get(room, Room(code=0, tests=0, raised=[]))
        grown = [counts[kind] - most for kind, most in (("code", bounds["code"]), ("tests", bounds["tests"]))]
        raised = [f"code {grown[0]:+}, tests {grown[1]:+}: {reason}"] if old and max(grown) > 0 else []
        sizes[room] = Room(code=counts["code"], tests=counts["tests"], raised=[*bounds["raised"], *raised])
    lines = ",\n".join(f"{json.dumps(room)}: {json.dumps(bounds)}" for room, bounds in sizes.items())
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", metavar="REASON", help=f"write {FILE.name} anew")
    reason = parser.parse_args().write
    print("\n".join(differences(read() if FILE.exists() else {}, count(), 1)))
    if reason is not None:
        write(reason)


if __name__ == "__main__":
    main()
