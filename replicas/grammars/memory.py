"""GrammarMemory: the grammars of an engine, and their memory.

Owns the grammars, in use and kept for later requests, and the bounds on their bytes, in all and per tenant.
Sizes are the routers' measurements.
"""

import threading
from collections import Counter, OrderedDict

from llguidance import LLMatcher

from replicas.grammars.constraint import ConstraintFailed

MAX_BYTES = 4 << 30
"""For grammars in use. A tenant may have half."""
MAX_KEPT = 32
MAX_KEPT_BYTES = 512 << 20
"""For grammars that are kept without a user."""
UNKNOWN_BYTES = 64 << 20
"""Assumed size of a grammar without a measurement."""
MAX_SHARED_TOKENS = 4096
"""Tokens of all answers to one grammar; the next answer gets new automata without states."""

GrammarKey = tuple[bytes, str]
"""The namespace's root, and the text. Tenants do not share compiled grammars: their readiness would tell what
others ask for."""


class SharedGrammar:
    """One grammar of one namespace. The first thread that holds the lock works it out."""

    def __init__(self, key: GrammarKey, tenant: bytes, num_bytes: int) -> None:
        self.key = key
        self.tenant = tenant
        self.num_bytes = num_bytes
        self.num_users = 0
        self.num_tokens = 0
        self.is_exhausted = False
        self.lock = threading.Lock()
        self.matcher: LLMatcher | None = None
        self.failure: ConstraintFailed | None = None


class GrammarMemory:
    """One thread calls it."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._latest: OrderedDict[GrammarKey, SharedGrammar] = OrderedDict()
        """The grammar for the next choice of a key, least recently used first."""
        self._bytes_of: Counter[bytes] = Counter()
        """By tenant, of those in use."""
        self.num_bytes = 0
        """Bytes in use."""
        self.num_kept_bytes = 0
        """Bytes kept without a user."""
        self._num_kept = 0

    def take(self, key: GrammarKey, tenant: bytes, num_bytes: int) -> SharedGrammar | None:
        """Take the key's grammar until it is returned; None without room."""
        num_bytes = num_bytes or UNKNOWN_BYTES
        found = self._latest.get(key)
        has_room = self._has_room(tenant, num_bytes)
        if found is None or (found.num_tokens >= MAX_SHARED_TOKENS and has_room):
            if not has_room:
                return None
            if found is not None:
                self._drop(found)
            found = self._latest[key] = SharedGrammar(key, tenant, num_bytes)
        elif not found.num_users:
            if not self._has_room(tenant, found.num_bytes):
                return None
            self._num_kept -= 1
            self.num_kept_bytes -= found.num_bytes
        self._latest.move_to_end(key)
        if not found.num_users:
            self._count(found, found.num_bytes)
        found.num_users += 1
        return found

    def give_back(self, grammar: SharedGrammar) -> None:
        grammar.num_users -= 1
        if grammar.num_users:
            return
        self._count(grammar, -grammar.num_bytes)
        if self._latest.get(grammar.key) is grammar:
            self._num_kept += 1
            self.num_kept_bytes += grammar.num_bytes
            self._keep_within_bounds()

    def exhausted(self, grammar: SharedGrammar) -> None:
        """Mark a grammar that can have no more states; later choices get another."""
        if not grammar.is_exhausted:
            grammar.is_exhausted = True
            if self._latest.get(grammar.key) is grammar:
                self._drop(grammar)

    def _has_room(self, tenant: bytes, num_bytes: int) -> bool:
        most_of_tenant = self._max_bytes // 2 if tenant else self._max_bytes
        return (
            self.num_bytes + num_bytes <= self._max_bytes
            and self._bytes_of[tenant] + num_bytes <= most_of_tenant
        )

    def _count(self, grammar: SharedGrammar, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes_of[grammar.tenant] += num_bytes
        if not self._bytes_of[grammar.tenant]:
            del self._bytes_of[grammar.tenant]

    def _drop(self, grammar: SharedGrammar) -> None:
        del self._latest[grammar.key]
        if not grammar.num_users:
            self._num_kept -= 1
            self.num_kept_bytes -= grammar.num_bytes

    def _keep_within_bounds(self) -> None:
        """The tenant that keeps most, in number or in bytes, loses its least recently used."""
        while (are_too_many := self._num_kept > MAX_KEPT) or self.num_kept_bytes > MAX_KEPT_BYTES:
            kept = [each for each in self._latest.values() if not each.num_users]
            size_of = Counter[bytes]()
            for grammar in kept:
                size_of[grammar.tenant] += 1 if are_too_many else grammar.num_bytes
            ((largest, _),) = size_of.most_common(1)
            self._drop(next(grammar for grammar in kept if grammar.tenant == largest))
