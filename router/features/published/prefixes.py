"""PublishedPrefixes: the beginnings of prompts that an operator has published, for every tenant to share.

Owns which prompt begins with which of them. The rest of the prompt stays its tenant's own: see
`PublishedBeginning` in `replicas/protocol/blocks.py`.
"""

from collections.abc import Iterable, Sequence

import msgspec

PUBLISHED_NAMESPACE = "published"
"""The namespace of published blocks. No tenant's has this name: theirs have a colon."""

MAX_PREFIXES = 64
MAX_PREFIX_TOKENS = 131_072


class PublishedPrefix(msgspec.Struct, frozen=True):
    """`packed_tokens` are packed by `pack_token_ids`; `model` is the name that clients ask for, of a model or
    an adapter. `created` is in seconds since 1970."""

    prefix_id: str
    model: str
    packed_tokens: bytes
    created: float
    name: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.packed_tokens) // 4


class PublishedPrefixes:
    def __init__(self, prefixes: Iterable[PublishedPrefix] = ()) -> None:
        self._by_model: dict[str, list[PublishedPrefix]] = {}
        self.replace(prefixes)

    def replace(self, prefixes: Iterable[PublishedPrefix]) -> None:
        by_model: dict[str, list[PublishedPrefix]] = {}
        for prefix in sorted(prefixes, key=lambda prefix: -prefix.num_tokens):
            by_model.setdefault(prefix.model, []).append(prefix)
        self._by_model = by_model

    def __len__(self) -> int:
        return sum(map(len, self._by_model.values()))

    def all(self) -> Sequence[PublishedPrefix]:
        """The oldest first."""
        prefixes = [prefix for of_model in self._by_model.values() for prefix in of_model]
        return sorted(prefixes, key=lambda prefix: (prefix.created, prefix.prefix_id))

    def num_blocks(self, model: str, packed_tokens: bytes, block_size: int) -> int:
        """Number of leading blocks that are published: those of the longest prefix the prompt begins with."""
        for prefix in self._by_model.get(model, ()):
            if packed_tokens.startswith(prefix.packed_tokens):
                return prefix.num_tokens // block_size
        return 0
