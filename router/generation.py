"""Generation: all that dispatch needs of a request.

Plain data; knows nothing of where it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import NO_USER, SamplingParams, UserTag
from replicas.protocol.status import Adapter

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Generation:
    """`block_hashes` are the prompt's full blocks under `root`. `tenant` is a label for those who watch."""

    model: str
    token_ids: Sequence[int]
    root: BlockHash
    block_hashes: Sequence[BlockHash]
    bucket: bytes
    sampling: SamplingParams
    num_choices: int = 1
    priority: int = 0
    adapter: Adapter | None = None
    user: UserTag = NO_USER
    tenant: str = DEFAULT_TENANT
    prompt_cache_key: str | None = None
