"""HashedRequest and VirtualRequest: a trace's request as routers see it, and as a replica serves it.

Owns how the ids of a trace become block hashes and buckets. Knows no time, no pool and no policy.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtests.workloads import TraceRequest, Workload
from replicas.kvstore.chunk import ChunkName
from replicas.media.encoding import Encoding
from replicas.protocol.blocks import HASH_BYTES, BlockHash, ImageTokens
from replicas.protocol.frames import NO_USER, UserTag
from replicas.protocol.images import MEDIA_HASH_BYTES
from router.programs.name import ProgramName
from router.routing.bucket import BUCKET_TOKENS, bucket_of

ROOT = BlockHash(b"kvasir-simulated")
"""Every trace is one namespace."""

_OUTPUT_BIT = 1 << (8 * HASH_BYTES - 1)
"""Set in the hashes of answers, which are no prompt's: no trace says how one is read again."""

_OUTPUT_BLOCKS_PER_REQUEST = 1 << 32


@dataclass(frozen=True, slots=True)
class HashedRequest:
    """`number` is its place in the workload; `block_hashes` are those of the prompt's full blocks."""

    number: int
    trace: TraceRequest
    block_hashes: tuple[BlockHash, ...]
    bucket: bytes
    user: UserTag
    media: tuple[ImageTokens, ...] = ()
    program: ProgramName | None = None
    ends_user_turn: bool | None = None
    """Its answer ends the client's turn; else a tool runs. None where the workload does not say."""


def prepare(workload: Workload) -> list[HashedRequest]:
    """Return the workload with the hashes and buckets that routers would compute; the same for every
    policy."""
    known: dict[int, BlockHash] = {}
    return [
        hashed(number, trace, workload.block_tokens, known) for number, trace in enumerate(workload.requests)
    ]


def hashed(
    number: int,
    trace: TraceRequest,
    block_tokens: int,
    known: dict[int, BlockHash],
    *,
    program: ProgramName | None = None,
    ends_user_turn: bool | None = None,
) -> HashedRequest:
    """`known` are the hashes of earlier requests, by id. This one's are added."""
    return HashedRequest(
        number=number,
        trace=trace,
        block_hashes=tuple(
            known.setdefault(block_id, BlockHash(block_id.to_bytes(HASH_BYTES, "big")))
            for block_id in trace.prefix_ids[: trace.num_input_tokens // block_tokens]
        ),
        bucket=_bucket(trace, block_tokens),
        user=UserTag(trace.user.encode()) if trace.user else NO_USER,
        media=tuple(
            ImageTokens(_media_hash(image.content), image.start, image.num_tokens) for image in trace.images
        ),
        program=program,
        ends_user_turn=ends_user_turn,
    )


def _media_hash(content: str) -> bytes:
    return hashlib.blake2b(content.encode(), digest_size=MEDIA_HASH_BYTES).digest()


def block_id(block_hash: BlockHash) -> int:
    """Return the trace's id of a prompt's block; of an answer's, one that is no trace's."""
    return int.from_bytes(block_hash, "big")


def _bucket(trace: TraceRequest, block_tokens: int) -> bytes:
    """By the id of the head's last block, which stands for all of the head's tokens."""
    num_head_blocks = max(1, BUCKET_TOKENS // block_tokens)
    head_id = trace.prefix_ids[min(num_head_blocks, len(trace.prefix_ids)) - 1]
    pseudo_tokens = (head_id % 2**128).to_bytes(16, "little")
    return bucket_of(ROOT, trace.prompt_cache_key, pseudo_tokens, None, BUCKET_TOKENS)


def num_common(chain: Sequence[BlockHash], other: Sequence[BlockHash]) -> int:
    """Count the leading blocks that two chains share. Behind a difference none is equal."""
    return bisect_left(range(min(len(chain), len(other))), True, key=lambda at: chain[at] != other[at])


def never() -> bool:
    return False


class VirtualRequest:
    """One attempt at a request while a replica owns it.

    ::

        num_tokens     prompt and output so far; the newest output token has no KV yet
        num_computed   how many of them have KV (or are scheduled to), while it waits or prefills
        kv_offset      while it decodes: num_computed minus the replica's count of steps
    """

    __slots__ = (
        "announcement_id",
        "block_hashes",
        "block_ids",
        "chunk_names",
        "encoding",
        "is_awaited",
        "is_decoding",
        "kv_offset",
        "max_tokens",
        "num_cached_tokens",
        "num_computed",
        "num_cross_user_tokens",
        "num_device_tokens",
        "num_expected_tokens",
        "num_planned_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_stored_blocks",
        "num_submitted_tokens",
        "num_tokens",
        "number",
        "rank",
        "stint",
        "tenant",
        "user",
        "waits_until",
    )

    def __init__(
        self,
        number: int,
        *,
        num_prompt_tokens: int,
        max_tokens: int,
        prompt_hashes: Sequence[BlockHash],
        user: UserTag,
        tenant: bytes = b"",
        num_output_tokens: int = 0,
        media: Sequence[ImageTokens] = (),
    ) -> None:
        self.number = number
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.block_hashes = list(prompt_hashes)
        self.user = user
        self.tenant = tenant
        self.num_tokens = self.num_submitted_tokens = num_prompt_tokens + num_output_tokens
        self.encoding = Encoding(media) if media else None
        """The encoding of its images, if it has any."""
        self.announcement_id: int | None = None
        """While what it will make is announced."""
        self.block_ids: list[int] = []
        self.chunk_names: list[ChunkName] = []
        """Names of the chunks that it may find cached, if there is memory below the device."""
        self.num_planned_tokens = 0
        """Tokens brought to the device while it waits."""
        self.waits_until = 0.0
        """Deadline of its wait; then missing tokens are computed."""
        self.is_awaited: Callable[[], bool] = never
        """Whether another replica computes its prompt, and more of that is to come."""
        self.rank = 0
        self.stint = 0
        """Grows whenever it stops to decode, so that what was noted for before is known to be void."""
        self.is_decoding = False
        self.kv_offset = 0
        self.num_computed = 0
        self.num_stored_blocks = 0
        self.num_cached_tokens = 0
        self.num_device_tokens = 0
        """Cached tokens that it has found on the device."""
        self.num_cross_user_tokens = 0
        self.num_expected_tokens = 0
        self.num_preemptions = 0

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """Known tokens without KV, while it waits or prefills."""
        return self.num_tokens - self.num_computed

    def num_findable_blocks(self, block_size: int) -> int:
        """The last token is always computed, since its logits are wanted."""
        return (self.num_tokens - 1) // block_size

    def hashes(self, num_blocks: int) -> list[BlockHash]:
        """Return the hashes of the leading full blocks: the prompt's, then this request's answer, which no
        other shares."""
        for block in range(len(self.block_hashes), num_blocks):
            value = _OUTPUT_BIT | self.number * _OUTPUT_BLOCKS_PER_REQUEST | block
            self.block_hashes.append(BlockHash(value.to_bytes(HASH_BYTES, "big")))
        return self.block_hashes[:num_blocks]
