"""vLLM's own scheduler and cache manager over hand-made groups, with made-up answers: no model runs.

For families whose kernels do not run on a CPU, and for shapes of real models. Imports vLLM.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm import EngineArgs, SamplingParams
from vllm.config import KVEventsConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from replicas.protocol.blocks import pack_token_ids
from replicas.protocol.events import CacheEvent
from replicas.protocol.frames import SamplingParams as OurSampling
from replicas.protocol.frames import Submit
from replicas.protocol.status import ModelCard
from replicas.toy_model import toy_model_path
from replicas.vllm_engine.cache_shape import read_cache_shape
from replicas.vllm_engine.core_view import CoreView
from replicas.vllm_engine.sparse_translation import SparseTranslator
from tests.replicas.vllm_engine.foretold import ROOT
from tests.replicas.vllm_engine.hit_rule import HitRule

_HEADS: Any = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}


def full(block: int) -> Any:
    return FullAttentionSpec(block_size=block, **_HEADS)


def latent(block: int) -> Any:
    return MLAAttentionSpec(block_size=block, **_HEADS)


def sliding(block: int, window: int) -> Any:
    return SlidingWindowSpec(block_size=block, sliding_window=window, **_HEADS)


def sliding_latent(block: int, window: int) -> Any:
    return SlidingWindowMLASpec(block_size=block, sliding_window=window, **_HEADS)


def chunked(block: int, chunk: int) -> Any:
    return ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=chunk, **_HEADS)


def mamba(block: int) -> Any:
    return MambaSpec(block_size=block, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="align")


class Shape(NamedTuple):
    """`drafted` are the groups that a draft model reads; `match_unit` makes hits finer than blocks."""

    specs: Sequence[Any]
    num_blocks: int
    drafted: Sequence[int] = ()
    match_unit: int | None = None
    retention: int | None = 0


SHAPES = {
    "gpt-oss": Shape([sliding(32, 128), full(32)], 120),
    "gpt-oss, a tail every 256 tokens": Shape([sliding(32, 128), full(32)], 120, retention=256),
    "gpt-oss, dense": Shape([sliding(32, 128), full(32)], 120, retention=None),
    "gemma 3": Shape([sliding(32, 256)] * 5 + [full(32)], 300),
    "gemma 4": Shape([sliding(64, 256), full(32)], 120),
    "two windows": Shape([sliding(32, 100), sliding(32, 300), full(32)], 180),
    "llama 4": Shape([chunked(32, 256)] * 3 + [full(32)], 220),
    "mistral": Shape([sliding(32, 256)], 90),
    "qwen3-next": Shape([mamba(64)] * 3 + [full(64)], 80),
    "qwen3-next, finer hits": Shape([mamba(128)] * 3 + [full(128)], 60, match_unit=32),
    "jamba": Shape([mamba(32)] * 2 + [full(32)], 120),
    "kimi linear": Shape([mamba(128)] * 3 + [latent(128)], 60),
    "nemotron": Shape([mamba(128), full(32)], 90),
    "mamba 2": Shape([mamba(32)], 60),
    "states, a window and full attention": Shape([mamba(64), sliding(32, 200), full(32)], 120),
    "deepseek v4": Shape([latent(256), *map(sliding_latent, (64, 8, 4), (128, 12, 8))], 400),
    "gpt-oss, drafts": Shape([sliding(32, 128), full(32)], 120, (0, 1)),
    "gpt-oss, drafts on full attention": Shape([sliding(32, 128), full(32)], 120, (1,)),
    "gemma 4, drafts": Shape([sliding(64, 256), full(32)], 120, (0, 1)),
    "qwen3-next, drafts": Shape([mamba(64), mamba(64), full(64)], 80, (2,)),
    "qwen3-next, a tail every 256 tokens": Shape([mamba(64)] * 3 + [full(64)], 80, retention=256),
    "nemotron, drafts": Shape([mamba(128), full(32)], 90, (1,)),
}


class SchedulerRun:
    """Has what `CoreView` reads of an engine: `engine_core.engine_core.scheduler` and `vllm_config`."""

    def __init__(self, shape: Shape, max_model_len: int = 1024) -> None:
        self.vllm_config = _config(shape, max_model_len)
        groups = [
            KVCacheGroupSpec([f"layer.{number}"], spec, is_eagle_group=number in shape.drafted)
            for number, spec in enumerate(shape.specs)
        ]
        cache = KVCacheConfig(
            num_blocks=shape.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=shape.retention,
        )
        scheduler_block, hash_block = resolve_kv_cache_block_sizes(cache, self.vllm_config)
        cache.hash_block_size = hash_block
        sizes: Any = {"block_size": scheduler_block, "hash_block_size": hash_block}
        grammars = StructuredOutputManager(self.vllm_config)
        self.scheduler: Any = Scheduler(self.vllm_config, cache, grammars, **sizes)
        if shape.drafted:
            self._read_drafts(cache, scheduler_block, hash_block, max_model_len)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_block, sha256)
        self._rng = random.Random(5)
        self.engine_core = self
        self.core = CoreView(_Llm(self))
        self.shape = read_cache_shape(self.vllm_config, self.scheduler.kv_cache_manager)
        self.cache = SparseTranslator(self.shape, shape.num_blocks)
        self.card = ModelCard(
            *("m", "ff", "vllm", self.shape.alignment, shape.num_blocks, max_model_len, 1000),
            is_sparse=True,
            peek_tokens=self.shape.peek_tokens,
            retention_interval=self.shape.retention_interval,
            state_tokens=self.shape.state_tokens,
        )

    def _read_drafts(self, cache: Any, scheduler_block: int, hash_block: int, max_model_len: int) -> None:
        """As a speculative configuration would have it."""
        scheduler = self.scheduler
        scheduler.use_eagle = scheduler.use_eagle_block_drop = True
        scheduler.kv_cache_manager = KVCacheManager(
            kv_cache_config=cache,
            max_model_len=max_model_len,
            scheduler_block_size=scheduler_block,
            hash_block_size=hash_block,
            max_in_flight_tokens=self.vllm_config.max_in_flight_tokens,
            enable_caching=True,
            use_eagle=True,
            enable_kv_cache_events=True,
        )

    def add(self, name: str, token_ids: list[int], num_output_tokens: int) -> Any:
        params = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
        request = Request(name, token_ids, params, None, block_hasher=self._hasher, session_id=name)
        self.scheduler.add_request(request)
        packed = pack_token_ids(token_ids)
        self.cache.follow(name, request, Submit(1, packed, OurSampling(max_tokens=num_output_tokens), ROOT))
        return request

    def step(self) -> list[CacheEvent]:
        scheduled = self.scheduler.schedule()
        ids = list(scheduled.num_scheduled_tokens)
        requests = [self.scheduler.requests[each] for each in ids]
        tokens = [
            [self._rng.randrange(10, 1000)] if request.num_computed_tokens >= request.num_tokens else []
            for request in requests
        ]
        indices = {each: place for place, each in enumerate(ids)}
        self.scheduler.update_from_output(
            scheduled, ModelRunnerOutput(req_ids=ids, req_id_to_index=indices, sampled_token_ids=tokens)
        )
        events = self.cache.translate(self.core.take_events())
        for request in requests:
            if request.is_finished():
                self.cache.forget(request.session_id)
        return events

    def held(self) -> HitRule:
        """The slow rule over what vLLM's blocks hold, by its own word."""
        rule = HitRule(self.shape.groups, self.shape.hash_block, self.shape.alignment)
        pool = self.scheduler.kv_cache_manager.block_pool
        for block in pool.blocks:
            more = pool.cached_block_hashes_by_block.get(block.block_id, ())
            for named in [*([] if block.block_hash is None else [block.block_hash]), *more]:
                theirs, group = bytes(named)[:-4], int.from_bytes(bytes(named)[-4:], "big")
                rule.copies[group][theirs] += 1
        return rule


class _Llm:
    def __init__(self, run: SchedulerRun) -> None:
        self.vllm_config = run.vllm_config
        self.engine_core: Any = type("Client", (), {"engine_core": run})


def _config(shape: Shape, max_model_len: int) -> Any:
    block = max(spec.block_size for spec in shape.specs)
    arguments = EngineArgs(
        model=str(toy_model_path()),
        dtype="bfloat16",
        max_model_len=max_model_len,
        block_size=block,
        kv_cache_memory_bytes=64 << 20,
        max_num_batched_tokens=512,
        max_num_seqs=8,
        enable_prefix_caching=True,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        skip_tokenizer_init=True,
        async_scheduling=False,
        enforce_eager=True,
        disable_log_stats=True,
        distributed_executor_backend="uni",
    )
    config: Any = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = shape.num_blocks
    config.cache_config.prefix_match_unit = shape.match_unit
    config.cache_config.prefix_cache_retention_interval = shape.retention
    if any(isinstance(spec, MambaSpec) for spec in shape.specs):
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.mamba_block_size = block
    register_all_kvcache_specs(config)
    return config
