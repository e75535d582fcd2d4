"""Recorded sessions of agents, for a closed loop: a line says how the file was made, then one session a line.

Owns that format. A turn's prompt is known by its full blocks, as ranges `[first id, count]`: equal ids stand
for equal tokens from the prompt's beginning to the end of that block, over the whole file.
"""

import gzip
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

SESSIONS = Path(__file__).parent / "data"
"""Files for 32, 48 and 64 lanes, with three seeds each."""

FORMAT, VERSION = "kvasir-sessions", 1

MAX_HEAD_BYTES = 65_536
"""Longest first line that is recognised."""

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_Number = Annotated[int, msgspec.Meta(ge=0)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """`think_seconds` pass before it. `block_ids` are those of its prompt's full blocks."""

    num_input_tokens: int
    num_output_tokens: int
    think_seconds: float
    ends_user_turn: bool
    """The answer before it ended the client's turn; else a tool ran."""
    block_ids: tuple[int, ...]

    def num_leading_blocks(self, seen: Set[int]) -> int:
        """Count those that its prompt begins with and that are among `seen`."""
        numbers = (number for number, block_id in enumerate(self.block_ids) if block_id not in seen)
        return next(numbers, len(self.block_ids))


@dataclass(frozen=True, slots=True)
class Session:
    """A main session begins `after_seconds` after the one before it in its lane. A subagent begins that long
    after the answer to its parent's turn `parent_turn`; the parent's next turn waits until it has ended.
    """

    id: str
    lane: int
    after_seconds: float
    agent: str
    parent: str | None
    parent_turn: int | None
    turns: tuple[SessionTurn, ...]


@dataclass(frozen=True, slots=True)
class SessionFile:
    """Each lane serves its sessions in this order. A parent comes before its subagents."""

    name: str
    block_tokens: int
    sessions: tuple[Session, ...]


class _SessionHead(msgspec.Struct):
    format: str
    version: int
    block_tokens: _Tokens


class _SessionTurn(msgspec.Struct):
    num_input_tokens: _Tokens = msgspec.field(name="in")
    num_output_tokens: _Tokens = msgspec.field(name="out")
    think: _Seconds
    blocks: list[tuple[_Number, _Number]]
    user: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0


class _Session(msgspec.Struct):
    id: str
    lane: _Number
    after: _Seconds
    agent: str
    turns: Annotated[list[_SessionTurn], msgspec.Meta(min_length=1)]
    parent: str | None = None
    turn: _Number | None = None


def is_session_file(path: Path | str) -> bool:
    """Tell by its first line whether the file holds sessions. Raises OSError."""
    with _open(Path(path)) as lines:
        try:
            return msgspec.json.decode(lines.readline(MAX_HEAD_BYTES), type=_SessionHead).format == FORMAT
        except (msgspec.DecodeError, EOFError, gzip.BadGzipFile):
            return False


def read_sessions(path: Path | str) -> SessionFile:
    """Read a .jsonl or .jsonl.gz file. Raises ValueError that names the line, or OSError."""
    path = Path(path)
    with _open(path) as lines:
        return parse_sessions(path.name.split(".")[0], lines)


def _open(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def parse_sessions(name: str, lines: Iterable[bytes]) -> SessionFile:
    """Raises ValueError."""
    head: _SessionHead | None = None
    sessions: dict[str, Session] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            if head is None:
                head = msgspec.json.decode(line, type=_SessionHead)
                if (head.format, head.version) != (FORMAT, VERSION):
                    raise ValueError(f"is not the head of {FORMAT}, version {VERSION}")
            else:
                session = _session(msgspec.json.decode(line, type=_Session), head.block_tokens, sessions)
                sessions[session.id] = session
        except (msgspec.DecodeError, ValueError) as error:
            raise ValueError(f"line {number} of the sessions: {error}") from error
    if head is None or not sessions:
        raise ValueError("there are no sessions in the file")
    return SessionFile(name, head.block_tokens, tuple(sessions.values()))


def _session(found: _Session, block_tokens: int, before: dict[str, Session]) -> Session:
    """Raises ValueError."""
    if found.id in before:
        raise ValueError(f"there is a session {found.id!r} already")
    if (found.parent is None) != (found.turn is None):
        raise ValueError("parent and turn need each other")
    if found.parent is not None and found.turn is not None:
        parent = before.get(found.parent)
        if parent is None:
            raise ValueError(f"its parent {found.parent!r} is not in the lines before")
        if found.turn >= len(parent.turns):
            raise ValueError(f"its parent has no turn {found.turn}")
    turns = tuple(_turn(number, turn, block_tokens) for number, turn in enumerate(found.turns))
    return Session(found.id, found.lane, found.after, found.agent, found.parent, found.turn, turns)


def _turn(number: int, turn: _SessionTurn, block_tokens: int) -> SessionTurn:
    num_full, num_blocks = turn.num_input_tokens // block_tokens, sum(count for _, count in turn.blocks)
    if num_blocks != num_full:
        raise ValueError(
            f"turn {number} has {num_blocks} blocks; its {turn.num_input_tokens} tokens are {num_full} full "
            f"ones of {block_tokens}"
        )
    ids = tuple(block_id for first, count in turn.blocks for block_id in range(first, first + count))
    return SessionTurn(turn.num_input_tokens, turn.num_output_tokens, turn.think, turn.user == 1, ids)
