"""A Dockerfile as a list of instructions: as much of its grammar as ours use."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DOCKERFILES = sorted((ROOT / "deploy/images").glob("*.Dockerfile"))


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    rest: str


def instructions(path: Path) -> list[Instruction]:
    """In order, continued lines joined, comments left out."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [Instruction(name, " ".join(rest.split())) for name, _, rest in found]


def last_stage(path: Path) -> list[Instruction]:
    """What the image itself is made of."""
    found = instructions(path)
    start = max(number for number, each in enumerate(found) if each.name == "FROM")
    return found[start:]


def only(found: list[Instruction], name: str) -> str:
    """The rest of the one instruction with this name."""
    (rest,) = [each.rest for each in found if each.name == name]
    return rest


def command(found: list[Instruction], name: str) -> list[str]:
    """The words of an ENTRYPOINT or HEALTHCHECK in exec form."""
    rest = only(found, name)
    words: list[str] = json.loads(rest[rest.index("[") :])
    return words


def environment(path: Path) -> dict[str, str]:
    """What a container of the image finds in its environment, as far as the file says it."""
    pairs = [pair for each in last_stage(path) if each.name == "ENV" for pair in shlex.split(each.rest)]
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
