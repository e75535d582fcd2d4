"""Generation: all that dispatch needs of a request.

Plain data.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import SamplingParams, Submit
from replicas.protocol.status import Adapter

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Generation:
    """`submit` is what a replica is to be asked for, as far as it is known before one is chosen; each attempt
    sets the rest. `token_ids` are those that it has packed, `block_hashes` the prompt's full blocks under its
    root. `tenant` is a label for those who watch.
    """

    model: str
    token_ids: Sequence[int]
    submit: Submit
    block_hashes: Sequence[BlockHash]
    bucket: bytes
    adapter: Adapter | None = None
    tenant: str = DEFAULT_TENANT
    prompt_cache_key: str | None = None

    @property
    def sampling(self) -> SamplingParams:
        return self.submit.sampling

    @property
    def num_choices(self) -> int:
        return self.submit.num_choices
