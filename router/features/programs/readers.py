"""Readers: by which headers and fields agents name their sessions.

Owns the table. Pure. The first reader that finds a session names the program. Nothing that a client says is
trusted beyond its tenant: a lie only misplaces its own requests.

    Claude Code 2.1, Codex 0.171, OpenCode 1.18: as these send them; `docs/coding-agents.md` has the details
    a client of one's own: x-kvasir-program, and x-kvasir-agent and x-kvasir-parent-agent of subagents
    else the body's prompt_cache_key; else the beginning of a conversation that is offered tools and goes on
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from router.encoded import EncodedHistory
from router.programs.name import KEY_BYTES, ProgramName

MAX_VALUE_BYTES = 256
MAX_JSON_BYTES = 4096

Values = Mapping[str, str]
"""Values of headers that some reader knows; empty are those that cannot be read."""


@dataclass(frozen=True, slots=True)
class Reader:
    """`sessions` are the headers that may name one, in order. An agent that is its session's own is the main
    one. `is_side` tells a call beside the turns."""

    source: str
    sessions: tuple[str, ...]
    agent: str | None = None
    parent_agent: str | None = None
    parent_session: str | None = None
    """Set for agents whose subagents have sessions of their own."""
    is_side: Callable[[Values], bool] = lambda values: False
    side_field: str | None = None
    signs: tuple[str, ...] = ()
    """Headers by which the agent itself is known. It always offers tools: a request without is a call beside
    the turns, such as for a title."""

    @property
    def fields(self) -> Iterable[str]:
        others = (self.agent, self.parent_agent, self.parent_session, self.side_field)
        return [*self.sessions, *self.signs, *(field for field in others if field is not None)]

    def read(self, values: Values, *, offers_tools: bool) -> ProgramName | None:
        field = next((each for each in self.sessions if values.get(each)), None)
        if field is None or "" in (values.get(self.agent or ""), values.get(self.parent_agent or "")):
            return None
        session = values[field]
        agent = values.get(self.agent or "", "")
        if agent == session:
            agent = ""
        parent = parent_session = None
        if agent:
            parent = values.get(self.parent_agent or "", "")
            parent = "" if parent == session else parent
        elif self.parent_session is not None and (values.get(self.parent_session) or session) != session:
            parent, parent_session = "", values[self.parent_session]
        is_side = self.is_side(values) or (not offers_tools and any(sign in values for sign in self.signs))
        return ProgramName(self.source, field, session, agent, parent, parent_session, is_side)


CLAUDE_SIDE_CLASSES = frozenset({"auxiliary", "compaction", "side_reply"})


def _is_claude_side(values: Values) -> bool:
    return values.get("x-claude-code-request-class") in CLAUDE_SIDE_CLASSES


def _is_codex_side(values: Values) -> bool:
    return _json_text(values.get("x-codex-turn-metadata", ""), "request_kind") not in (None, "turn")


OWN = Reader("kvasir", ("x-kvasir-program",), "x-kvasir-agent", "x-kvasir-parent-agent")
CLAUDE_CODE = Reader(
    "claude-code",
    ("x-claude-code-session-id",),
    "x-claude-code-agent-id",
    "x-claude-code-parent-agent-id",
    is_side=_is_claude_side,
    side_field="x-claude-code-request-class",
    signs=("x-claude-code-session-id",),
)
OPENCODE = Reader(
    "opencode",
    ("x-opencode-session", "x-session-affinity", "x-session-id"),
    parent_session="x-parent-session-id",
    signs=("x-opencode-session", "x-session-affinity"),
)
CODEX = Reader(
    "codex",
    ("session-id", "session_id"),
    "thread-id",
    "x-codex-parent-thread-id",
    is_side=_is_codex_side,
    side_field="x-codex-turn-metadata",
    signs=("thread-id", "x-codex-turn-metadata"),
)
READERS = (OWN, CLAUDE_CODE, OPENCODE, CODEX)

JSON_FIELDS = frozenset({"x-codex-turn-metadata"})
"""Longer than others, since they are JSON."""


class Readers:
    """`own_headers` are the operator's, which come first."""

    def __init__(self, own_headers: Iterable[str] = ()) -> None:
        own = tuple(header.lower() for header in own_headers)
        self._readers = (Reader("header", own), *READERS) if own else READERS
        self._names = {name.encode(): name for reader in self._readers for name in reader.fields}
        self.num_unreadable = 0

    def named(
        self,
        headers: Iterable[tuple[bytes, bytes]],
        *,
        offers_tools: bool = False,
        end_user: str | None = None,
        prompt_cache_key: str | None = None,
    ) -> ProgramName | None:
        """Name the program of a request by its headers and by what its body says."""
        names = self._names
        found = [(names[name], value) for name, value in headers if name in names]
        if found:
            values = self._readable(found)
            for reader in self._readers:
                name = reader.read(values, offers_tools=offers_tools)
                if name is not None:
                    return name
        if end_user is not None and end_user.startswith("{"):  # Claude Code behind a proxy that drops headers
            session = _json_text(end_user, "session_id")
            if session is not None and _is_readable(session):
                return ProgramName("claude-code", "metadata.user_id", session, is_side=not offers_tools)
        if prompt_cache_key is not None and _is_readable(prompt_cache_key):
            return ProgramName("prompt_cache_key", "prompt_cache_key", prompt_cache_key)
        return None

    def _readable(self, found: Iterable[tuple[str, bytes]]) -> Values:
        """Return the values. The first counts of a header that comes twice."""
        values: dict[str, str] = {}
        for name, value in found:
            if name in values:
                continue
            text = value.decode("latin-1")
            is_readable = _is_readable(text, MAX_JSON_BYTES if name in JSON_FIELDS else MAX_VALUE_BYTES)
            values[name] = text if is_readable else ""
            self.num_unreadable += not is_readable
        return values


def conversation_name(history: EncodedHistory) -> ProgramName | None:
    """Name a program by all that comes before the first answer: as it goes on, that stays the same.

    A conversation without an answer is none yet: most requests that offer a tool are never gone on with.
    """
    if not history.answers:
        return None
    beginning = hashlib.sha256(b"".join(history.digests[: history.answers[0] + 1])).hexdigest()
    return ProgramName("conversation", "messages", beginning[: 2 * KEY_BYTES])


def _is_readable(text: str, max_bytes: int = MAX_VALUE_BYTES) -> bool:
    return 0 < len(text) <= max_bytes and text.isprintable() and not text.isspace()


def _json_text(text: str, field: str) -> str | None:
    """Return a text of an object in JSON; None if it is not there."""
    if not 0 < len(text) <= MAX_JSON_BYTES:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = value.get(field) if isinstance(value, dict) else None
    return found if isinstance(found, str) else None
