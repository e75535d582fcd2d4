"""RememberedHistory: the exact tokens of conversations that were answered here, by their keys.

Owns the records and their bound in bytes. A record holds what its conversation adds to the one before, so a
long conversation is stored once. It is readable while those before it are present, and using it uses them
too. The least recently used goes first; a tenant above its share evicts its own. A missing record only costs
cached tokens. Notes when other routers were last told of a record. All times are of one clock, in seconds.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType

from router.history.canonical import ConversationKey, Thought, is_ending, is_thought
from router.shared.instruments import Instrument, counter, gauge

RECORD_BYTES = 500
"""Bytes of a record besides its tokens."""

TENANT_SHARE = 0.5
"""Share of the room. A tenant may have more while no other needs it."""

LARGEST_SHARE = 0.25
"""Share of the room for one record."""


Mark = NewType("Mark", bytes)
"""Digest of a record and all before it: equal at all routers, unlike a serial."""


class Found(NamedTuple):
    """A remembered conversation: the position of its last message, and its tokens, packed."""

    position: int
    key: ConversationKey
    token_ids: bytes
    serial: int


class AskedAnswer(NamedTuple):
    """Facts of a question by which other routers recognise its answer: the prompt's bytes among those that
    the conversation adds; whether it might call tools, and began in reasoning."""

    num_bytes: int
    may_call: bool
    starts_in_reasoning: bool


@dataclass(slots=True)
class Record:
    """`mark` and `told_at` belong to the code that tells other routers; only this module changes the rest. It
    `has_rivals` if an answer with the same words and other reasoning was remembered before."""

    serial: int
    tenant: str
    added: bytes
    parent: ConversationKey | None
    parent_serial: int
    thought: Thought | None
    asked: AskedAnswer | None = None
    """None if it cannot be sent to others."""
    mark: Mark | None = None
    """Set once it was sent to other routers, or came from them."""
    told_at: float | None = None
    has_rivals: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.added) + len(self.thought or b"") + RECORD_BYTES


class RememberedHistory:
    """For one thread. `max_bytes` of 0 remembers nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._records: OrderedDict[ConversationKey, Record] = OrderedDict()
        self._tenants: dict[str, _TenantAnswers] = {}
        self.num_bytes = 0
        self._serial = 0
        self.num_evicted = 0
        self.num_refused = 0

    @property
    def num_records(self) -> int:
        return len(self._records)

    def instruments(self) -> Iterator[Instrument]:
        yield gauge(
            "router_history_bytes",
            "Memory of the tokens of answered conversations",
            lambda: self.num_bytes,
        )
        yield gauge(
            "router_history_conversations",
            "Beginnings of conversations whose tokens are remembered",
            lambda: self.num_records,
        )
        yield counter(
            "router_history_evicted_total",
            "Beginnings of conversations that made room for others",
            lambda: self.num_evicted,
        )

    def find(self, keys: Sequence[ConversationKey]) -> Found | None:
        """Find the longest remembered beginning of the conversation with these keys."""
        for position in range(len(keys) - 1, -1, -1):
            key = keys[position]
            record = self._records.get(key)
            if record is None:
                continue
            chain = self._chain(key, record)
            if chain is None:
                self._forget(key)
                continue
            for used in chain:
                self._touch(used)
            added = [self._records[used].added for used in reversed(chain)]
            return Found(position, key, b"".join(added), record.serial)
        return None

    def is_other(self, key: ConversationKey, thought: Thought) -> bool:
        """Whether the answer that the conversation of `key` ends with was generated with other reasoning. Of
        one that is not known it is not. The end of its reasoning will do, unless it has rivals: theirs may
        end alike."""
        record = self._records.get(key)
        if record is None or record.thought is None or is_thought(thought, record.thought):
            return False
        return record.has_rivals or not is_ending(thought, record.thought)

    def holds(self, key: ConversationKey, mark: Mark) -> bool:
        """Whether the conversation of `key` is remembered as the one of that mark, with all before it."""
        record = self._records.get(key)
        return record is not None and record.mark == mark and self._chain(key, record) is not None

    def remember(
        self,
        tenant: str,
        key: ConversationKey,
        added: bytes,
        parent: Found | None = None,
        thought: Thought | None = None,
        asked: AskedAnswer | None = None,
    ) -> None:
        """Remember a conversation: the packed tokens of `parent`, as found, and `added`, which ends with an
        answer of that reasoning."""
        if parent is not None:
            before = self._records.get(parent.key)
            if parent.key == key or before is None or before.serial != parent.serial:
                added, parent, asked = parent.token_ids + added, None, None
        parent_key, parent_serial = (None, 0) if parent is None else (parent.key, parent.serial)
        known = self._records.get(key)
        if known is not None and (known.added, known.parent_serial) == (added, parent_serial):
            return  # what went on from it stays
        self._put(key, tenant, added, parent_key, parent_serial, thought, asked)

    def adopt(
        self,
        tenant: str,
        key: ConversationKey,
        added: bytes,
        parent: ConversationKey | None,
        thought: Thought | None,
        asked: AskedAnswer,
        mark: Mark,
        told_at: float,
    ) -> bool:
        """Add another router's record after the conversation that it continued. Returns whether there is
        room."""
        if self.holds(key, mark):
            return True
        before = None if parent is None else self._records.get(parent)
        if parent is not None and before is None:
            return False
        parent_serial = 0 if before is None else before.serial
        record = self._put(key, tenant, added, parent, parent_serial, thought, asked)
        if record is not None:
            record.mark, record.told_at = mark, told_at
        return key in self._records

    def chain(self, key: ConversationKey) -> list[tuple[ConversationKey, Record]]:
        """Return the record of `key` and those that it needs, earliest first; empty if one of them is
        gone."""
        record = self._records.get(key)
        chain = None if record is None else self._chain(key, record)
        return [(used, self._records[used]) for used in reversed(chain or ())]

    def _put(
        self,
        key: ConversationKey,
        tenant: str,
        added: bytes,
        parent: ConversationKey | None,
        parent_serial: int,
        thought: Thought | None,
        asked: AskedAnswer | None,
    ) -> Record | None:
        """None if it is too large."""
        if len(added) + RECORD_BYTES > self._max_bytes * LARGEST_SHARE:
            self.num_refused += 1
            return None
        before = self._records.get(key)
        self._forget(key)
        self._serial += 1
        record = Record(self._serial, tenant, added, parent, parent_serial, thought, asked)
        if before is not None and before.thought is not None and thought is not None:
            record.has_rivals = before.has_rivals or not is_thought(thought, before.thought)
        self._records[key] = record
        holder = self._tenants.setdefault(tenant, _TenantAnswers())
        holder.keys[key] = None
        holder.num_bytes += record.num_bytes
        self.num_bytes += record.num_bytes
        for used in self._chain(key, record) or ():
            self._touch(used)
        while self.num_bytes > self._max_bytes:
            is_over = holder.num_bytes > self._max_bytes * TENANT_SHARE
            self.num_evicted += 1
            self._forget(next(iter(holder.keys if is_over else self._records)))
        return record

    def _chain(self, key: ConversationKey, record: Record) -> list[ConversationKey] | None:
        """Return the keys of the record and all before it, latest first; None if one of them is gone."""
        chain = [key]
        while record.parent is not None:
            parent = self._records.get(record.parent)
            if parent is None or parent.serial != record.parent_serial:
                return None
            chain.append(record.parent)
            record = parent
        return chain

    def _touch(self, key: ConversationKey) -> None:
        self._records.move_to_end(key)
        self._tenants[self._records[key].tenant].keys.move_to_end(key)

    def _forget(self, key: ConversationKey) -> None:
        record = self._records.pop(key, None)
        if record is None:
            return
        self.num_bytes -= record.num_bytes
        holder = self._tenants[record.tenant]
        holder.num_bytes -= record.num_bytes
        del holder.keys[key]
        if not holder.keys:
            del self._tenants[record.tenant]


class _TenantAnswers:
    __slots__ = ("keys", "num_bytes")

    def __init__(self) -> None:
        self.keys: OrderedDict[ConversationKey, None] = OrderedDict()
        self.num_bytes = 0
