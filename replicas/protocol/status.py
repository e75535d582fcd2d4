"""A replica's name, incarnation, state, and the card of its model.

Owns the state table.
"""

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, NewType

from replicas.protocol.bounds import Uint32
from replicas.protocol.sampling_defaults import SamplingDefaults

ReplicaId = NewType("ReplicaId", str)
"""Stable across restarts, unique in a fleet: letters, digits, '.', '_' and '-'."""

Epoch = NewType("Epoch", str)
"""One incarnation of a replica. Everything said under an earlier one is void."""


class Role(enum.StrEnum):
    """Part that a replica should take in a split, a prompt computed at one replica and decoded at another. It
    is a preference: where no other replica can, each does all."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class SplitWay(enum.StrEnum):
    """How a replica takes part in splits: not at all, by chunks of host memory, or by its server's
    connector."""

    NONE = ""
    PULL = "pull"
    NIXL = "nixl"


Unit = Literal["tokens", "bytes"]
"""Bytes count as tokens where the server's tokenizer is not known."""


class ReplicaState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


TRANSITIONS: Mapping[ReplicaState, frozenset[ReplicaState]] = {
    ReplicaState.STARTING: frozenset({ReplicaState.READY, ReplicaState.STOPPED}),
    ReplicaState.READY: frozenset({ReplicaState.DRAINING, ReplicaState.STOPPED}),
    ReplicaState.DRAINING: frozenset({ReplicaState.STOPPED}),
    ReplicaState.STOPPED: frozenset(),
}
"""Every move that a replica may make. A move that is not listed is a bug, and raises."""


def advance(current: ReplicaState, following: ReplicaState) -> ReplicaState:
    """Return `following` if the table allows it, else raise ValueError."""
    if following not in TRANSITIONS[current]:
        raise ValueError(f"a replica cannot go from {current.value} to {following.value}")
    return following


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that a replica has loaded. `fingerprint` is the hex digest over its files."""

    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Everything that a router must know of a model.

    `fingerprint` is the hex digest over weights, tokenizer and chat template: replicas with equal
    fingerprints compute the same KV for the same tokens. `kv_layout` is the hex digest of the layout of KV
    that others may pull from its host memory; empty if it takes no part in pulls. `image_rule` maps an
    image's size to tokens, as `image_rules.written_rule` writes it; empty for a text model.

    Hits are multiples of `block_size`, the unit of block hashes. The cache is divided into `num_blocks` for
    all layers, and holds `capacity_tokens` in sequences of the full context.

    `is_sparse`: layers keep different caches, so a hit ends at a resume point only (`hits.py`); the index has
    the points, and apart from them how far full attention reaches. `peek_tokens`: a hit ends this far before
    the last block that it was found by, since a draft model reads that; 0 or a block. `retention_interval`:
    the tokens from one resume point to the next that a request leaves; with 0 it leaves one before its
    prompt's end, and one where the beginning ends that it shares with earlier prompts. `state_tokens`: the
    tokens between states, of layers that keep one instead of KV for each token; 0 if there are none.

    `endpoint` is the host:port of the server beside the replica, which gateways may send requests to by
    themselves, and `endpoint_rank` its data-parallel rank there; empty if there is none.

    `takes_bodies`: its server takes a client's body instead of tokens, in these forms (`BodyForm`);
    the tokens of a submit then only say what the server is expected to have cached. `told_context` is the
    server's own context length, where a token of ours is none of the server's; 0 if they are the same.
    `routes` are those that are passed on to it.

    `sampling_defaults` hold where a client has no word; None is neutral. A server has its own for those that
    are None in them.

    `role` and `splits_by` say what part it takes in splits.

    `aliases` are other names that clients may ask for the model by. These and `adapters` may change while the
    replica lives, and nothing else.
    """

    name: str
    fingerprint: str
    engine: str
    block_size: int
    num_blocks: Uint32
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[Uint32, ...] = ()
    max_batched_tokens: Uint32 = 0
    max_running: Uint32 = 0
    adapters: tuple[Adapter, ...] = ()
    kv_layout: str = ""
    image_rule: str = ""
    takes_published: bool = True
    capacity_tokens: int = 0
    """0 is `num_blocks` of `block_size`."""
    is_sparse: bool = False
    peek_tokens: int = 0
    retention_interval: int = 0
    state_tokens: int = 0
    endpoint: str = ""
    endpoint_rank: Uint32 | None = None
    takes_bodies: tuple[str, ...] = ()
    told_context: int = 0
    routes: tuple[str, ...] = ()
    sampling_defaults: SamplingDefaults | None = None
    aliases: tuple[str, ...] = ()
    role: Role = Role.BOTH
    splits_by: SplitWay = SplitWay.NONE

    @property
    def told_context_length(self) -> int:
        """The context length that clients are told."""
        return self.told_context or self.context_length

    @property
    def unit(self) -> Unit:
        """The unit of counts and positions in a prompt."""
        return "bytes" if self.told_context else "tokens"

    @property
    def num_cache_tokens(self) -> int:
        """The cache's size in tokens."""
        return self.capacity_tokens or self.num_blocks * self.block_size

    def digest(self) -> str:
        """Changes whenever any field does: a router fetches the card again when it sees a new one."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """The model's text side as files: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`, …."""

    files: Mapping[str, bytes]
