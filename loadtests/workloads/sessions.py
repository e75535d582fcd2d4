"""Sessions of agents, for a closed loop: a turn is sent when the answer before it has ended, after a pause.

Owns the file's format: gzipped JSON, one object a line. The first line says `"format": "kvasir-sessions"`,
its `version` and `block_tokens`; each other one is a session:

    id, lane, agent  its name; the lane that serves it; the kind of agent
    after            seconds from the end of the lane's session before it to its first turn
    parent, turn     of a subagent: who began it, by which answer; `after` counts from that answer's end
    turns            each with `in` and `out` tokens, `think` seconds before it, `user` if the answer before
                     ended its user's turn, and `blocks`: its full blocks as ranges `[first id, count]`

Equal ids are equal tokens up to there.
"""

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT, VERSION = "kvasir-sessions", 1
MAX_BLOCKS = 1 << 20
"""Of one prompt."""


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """`ends_user_turn`: the answer before it ended a turn of the client's user, else a tool ran."""

    num_input_tokens: int
    num_output_tokens: int
    think_seconds: float
    ends_user_turn: bool
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Session:
    """A lane serves its sessions one after another. A subagent begins `after_seconds` after its `parent`'s
    answer `parent_turn`, and the parent's next turn waits for it."""

    id: str
    lane: int
    after_seconds: float
    agent: str
    turns: tuple[SessionTurn, ...]
    parent: str | None = None
    parent_turn: int = 0


@dataclass(frozen=True, slots=True)
class SessionFile:
    name: str
    block_tokens: int
    sessions: tuple[Session, ...]

    @property
    def num_turns(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def num_input_tokens(self) -> int:
        return sum(turn.num_input_tokens for session in self.sessions for turn in session.turns)

    @property
    def num_lanes(self) -> int:
        return len({session.lane for session in self.sessions})


def is_session_file(path: Path | str) -> bool:
    """Whether the first line says so. A file that cannot be read is none."""
    try:
        with _open(Path(path)) as lines:
            head = json.loads(lines.readline(4096))
    except (OSError, EOFError, ValueError):
        return False
    return isinstance(head, dict) and head.get("format") == FORMAT


def read_sessions(path: Path | str) -> SessionFile:
    """Raises ValueError that names the line, or OSError."""
    path = Path(path)
    with _open(path) as lines:
        return parse_sessions(path.name.split(".")[0], lines)


def parse_sessions(name: str, lines: Iterable[str]) -> SessionFile:
    """Raises ValueError that names the line."""
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    sessions: dict[str, Session] = {}
    block_tokens = 0
    for number, line in numbered:
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("is no object")
            if not block_tokens:
                block_tokens = _block_tokens(record)
                continue
            session = _session(record, block_tokens, sessions)
        except ValueError as error:
            raise ValueError(f"line {number} of the sessions {error}") from error
        sessions[session.id] = session
    if not sessions:
        raise ValueError("the file has no sessions")
    return SessionFile(name, block_tokens, tuple(sessions.values()))


def _open(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return open(path, encoding="utf-8")


def _block_tokens(head: Mapping[str, Any]) -> int:
    if head.get("format") != FORMAT or head.get("version") != VERSION:
        raise ValueError(f"does not say that it is version {VERSION} of {FORMAT}")
    block_tokens = _whole(head, "block_tokens")
    if not block_tokens:
        raise ValueError("needs block_tokens above 0")
    return block_tokens


def _session(record: Mapping[str, Any], block_tokens: int, before: Mapping[str, Session]) -> Session:
    name, agent, turns = record.get("id"), record.get("agent"), record.get("turns")
    if not isinstance(name, str) or not isinstance(agent, str) or name in before:
        raise ValueError("needs texts as id and agent, and an id of its own")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("needs a list of objects as turns")
    parent, parent_turn = record.get("parent"), 0
    if parent is not None:
        if parent not in before:
            raise ValueError("has a parent that is not before it")
        parent_turn = _whole(record, "turn")
        if parent_turn >= len(before[parent].turns):
            raise ValueError("is begun by an answer that its parent has not")
    return Session(
        name,
        _whole(record, "lane"),
        _seconds(record, "after"),
        agent,
        tuple([_turn(turn, block_tokens) for turn in turns]),
        parent,
        parent_turn,
    )


def _turn(record: Mapping[str, Any], block_tokens: int) -> SessionTurn:
    num_input_tokens, num_output_tokens = _whole(record, "in"), _whole(record, "out")
    ids: list[int] = []
    ranges = record.get("blocks")
    for each in ranges if isinstance(ranges, list) else [None]:
        if not (isinstance(each, list) and len(each) == 2 and all(type(part) is int for part in each)):
            raise ValueError("needs a list of pairs of whole numbers as blocks")
        first, count = each
        if not 0 <= count <= MAX_BLOCKS or len(ids) + count > MAX_BLOCKS:
            raise ValueError(f"has a prompt of more than {MAX_BLOCKS} blocks")
        ids.extend(range(first, first + count))
    if not num_input_tokens or len(ids) != num_input_tokens // block_tokens:
        raise ValueError(
            f"has {len(ids)} blocks; {num_input_tokens} tokens are {num_input_tokens // block_tokens} full "
            f"blocks of {block_tokens}"
        )
    return SessionTurn(
        num_input_tokens,
        max(1, num_output_tokens),
        _seconds(record, "think"),
        bool(record.get("user")),
        tuple(ids),
    )


def _whole(record: Mapping[str, Any], field: str) -> int:
    value = record.get(field)
    if type(value) is not int or value < 0:
        raise ValueError(f"needs a whole number from 0 as {field}")
    return value


def _seconds(record: Mapping[str, Any], field: str) -> float:
    value = record.get(field)
    if type(value) not in (int, float) or not 0 <= value < 1e9:  # type: ignore[operator]
        raise ValueError(f"needs seconds as {field}")
    return float(value)  # type: ignore[arg-type]
