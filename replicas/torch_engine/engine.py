"""TorchEngine: Kvasir's own engine, one model on one device.

Owns the putting together of scheduler, model and sampler, and the sizing of the KV cache. Does
not know threads, gRPC or text; `replicas/loop.py` drives it.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from replicas.checkpoints.model_config import ModelConfig
from replicas.checkpoints.sampling_defaults import read_sampling_defaults
from replicas.checkpoints.weights import Checkpoint, load_checkpoint, load_headers
from replicas.config import ReplicaConfig
from replicas.engine import EngineRequest, RequestRefused, SharedKv, with_layout
from replicas.grammars.holding import GrammarHolder
from replicas.grammars.opening import open_holder
from replicas.kvstore.opening import open_store
from replicas.kvstore.store import ChunkStore
from replicas.process.settings import SettingsError
from replicas.protocol.frames import RefusalCode, RequestKey, StepFrame
from replicas.protocol.hand_overs import StoreQuestion
from replicas.protocol.media import ImageQuery
from replicas.protocol.status import ModelCard, Role, TokenizerBundle
from replicas.scheduling.kvcache_manager import KVCacheManager
from replicas.scheduling.lower_tiers import LowerTiers
from replicas.scheduling.request import SampledToken
from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.speed_meter import SpeedMeter
from replicas.scheduling.step_promise import StepPromise, open_promise, work_of
from replicas.torch_engine.attention import KVPool, kv_bytes_per_block
from replicas.torch_engine.chunk_copies import ChunkCopier, chunk_layout, payload_bytes
from replicas.torch_engine.model import Decoder
from replicas.torch_engine.runner import ModelRunner
from replicas.torch_engine.sampler import Sampler
from replicas.toy_model import checkpoint_directory

_CPU_CACHE_BYTES = 128 * 2**20
_FREE_GPU_MEMORY_RATIO = 0.85
_PAUSE_SECONDS = 0.0005
"""How long a step waits in which every request waits for KV that is on its way, or for its grammar."""
_SENSIBLE_CONTEXT = 256
"""A cache that cannot hold one sequence of this many tokens is a mistake in the settings."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchEngine:
    """Raises CheckpointError if the model cannot be served, SettingsError if the settings do not fit it.

    A `checkpoint` takes the place of the one in the directory that the settings name.
    """

    def __init__(self, config: ReplicaConfig, checkpoint: Checkpoint | None = None) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        if checkpoint is None:
            checkpoint = load_checkpoint(checkpoint_directory(config.model))
        self._bundle = checkpoint.bundle()
        device = _device(config.device)
        dtype = _dtype(config.dtype, checkpoint.config, device)
        model = Decoder(checkpoint, dtype=dtype, device=device)
        num_blocks = _num_blocks(config, checkpoint.config, dtype, device)
        context_length = _context_length(config, checkpoint.config, num_blocks)
        self._card = ModelCard(
            name=config.model_name or checkpoint.directory.resolve().name,
            fingerprint=checkpoint.fingerprint(),
            engine="torch",
            block_size=config.tokens_per_block,
            num_blocks=num_blocks,
            context_length=context_length,
            vocab_size=checkpoint.config.vocab_size,
            eos_token_ids=checkpoint.eos_token_ids,
            max_batched_tokens=config.tokens_per_step,
            max_running=config.max_running,
            sampling_defaults=read_sampling_defaults(config, checkpoint.directory),
            role=Role(config.role),
        )
        num_ids = num_blocks + 1  # the null block has an id too
        pool = KVPool(
            checkpoint.config,
            num_blocks=num_ids,
            block_size=config.tokens_per_block,
            dtype=dtype,
            device=device,
            attention=config.attention,
        )
        self.attention = pool.attention
        self._meter = SpeedMeter()
        self._spill_seconds = config.spill_seconds
        manager = KVCacheManager(num_ids, config.tokens_per_block)
        self.store, lower_tiers = _lower_tiers(config, self._card.fingerprint, pool, manager, self._meter)
        self._card = with_layout(self._card, self.shared_kv)
        self._grammars = open_holder(self._bundle, self._card, config.grammar_seconds)
        self._promise = open_promise(config.slo_tpot)
        self._scheduler = _scheduler(
            self._card, manager, config.max_waiting, lower_tiers, self._grammars, self._promise
        )
        self.runner = ModelRunner(model, pool, context_length)
        self._sampler = Sampler(checkpoint.eos_token_ids, self._grammars)

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def shared_kv(self) -> SharedKv | None:
        return None if self.store is None else self.store.shared

    def bundle(self) -> TokenizerBundle:
        """Return the files that the model's text goes through."""
        return self._bundle

    def begin(self, wake: Callable[[], None]) -> None:
        if self.store is not None:
            self.store.begin()

    def add(self, request: EngineRequest) -> None:
        if request.submit.media:
            raise RequestRefused(RefusalCode.INVALID_REQUEST, f"{self._card.name} reads text only")
        self._scheduler.add(request)

    def abort(self, key: RequestKey) -> None:
        self._scheduler.abort(key)

    def ask_store(self, question: StoreQuestion) -> None:
        if self.store is not None:
            self.store.take_overs.ask(question)

    def take_media(self, question: ImageQuery) -> None:
        """It reads text only."""

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def step(self) -> StepFrame:
        started = time.perf_counter()
        chunks = self._scheduler.schedule()
        sampled: dict[RequestKey, SampledToken] = {}
        if not chunks and self._scheduler.has_work():
            self._scheduler.wait(_PAUSE_SECONDS)
        if chunks:
            logits = self.runner.run(chunks)
            requests = [chunk.request for chunk in chunks if chunk.samples]
            if requests:
                sampled = self._sampler.sample(requests, logits)
        frame = self._scheduler.finish_step(chunks, sampled)
        seconds = time.perf_counter() - started
        if self.store is not None:
            self._meter.observe(frame, seconds)
        if self._promise is not None and chunks:
            self._promise.observe(work_of(chunks), seconds)
        return frame

    def reset_prefix_cache(self) -> bool:
        return self._scheduler.reset_prefix_cache()

    def close(self) -> None:
        """The model and its cache go with the runner, the only one that holds them."""
        del self.runner
        self._grammars.close()
        if self.store is not None:
            self.store.close(self._spill_seconds)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def check_model(config: ReplicaConfig, directory: Path) -> None:
    """Build the model from the headers of its weights. Raises the engine's own errors.

    On no device: the asking process may lack those that the engine will have.
    """
    checkpoint = load_headers(directory)
    dtype = _dtype(config.dtype, checkpoint.config, torch.device("cpu"))
    Decoder(checkpoint, dtype=dtype, device=torch.device("meta"))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f"setting device is cpu, cuda, cuda:N or auto, not {name}") from error
    if device.type not in ("cpu", "cuda"):
        raise SettingsError(f"setting device is cpu, cuda, cuda:N or auto, not {name}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(
            f"setting device is {name}, but torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return device


def _dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """On a CPU float32 by default: the others save memory there, but no time."""
    if name == "auto":
        name = model.dtype_name if device.type == "cuda" else "float32"
    if name not in DTYPES:
        raise SettingsError(f"setting dtype is {', '.join(DTYPES)} or auto, not {name}")
    return DTYPES[name]


def _num_blocks(config: ReplicaConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """How many KV blocks to allocate. Asked when the weights are loaded: they take their memory first."""
    if config.num_blocks is not None:
        return config.num_blocks
    available = config.kv_cache_bytes
    if available is None:
        available = _CPU_CACHE_BYTES
        if device.type == "cuda":
            available = int(torch.cuda.mem_get_info(device)[0] * _FREE_GPU_MEMORY_RATIO)
    return available // kv_bytes_per_block(model, config.tokens_per_block, dtype)


def _context_length(config: ReplicaConfig, model: ModelConfig, num_blocks: int) -> int:
    """Return the longest sequence that was asked for, that the model bears and that the cache holds."""
    wanted = min(config.context_length or model.longest_context, model.longest_context)
    capacity = num_blocks * config.tokens_per_block
    least = min(wanted, _SENSIBLE_CONTEXT)
    if capacity < least:
        raise SettingsError(
            f"the KV cache holds {capacity} tokens ({num_blocks} blocks of {config.tokens_per_block}), too "
            f"few for one sequence of {least}: raise num_blocks or kv_cache_bytes, or lower context_length"
        )
    return min(wanted, capacity)


def _lower_tiers(
    config: ReplicaConfig, fingerprint: str, pool: KVPool, manager: KVCacheManager, meter: SpeedMeter
) -> tuple[ChunkStore | None, LowerTiers | None]:
    blocks_per_chunk = config.tokens_per_chunk // config.tokens_per_block
    layout = chunk_layout(pool.blocks, config.tokens_per_chunk, fingerprint)
    store = open_store(config, layout, payload_bytes(pool.blocks, blocks_per_chunk))
    if store is None:
        return None, None
    copier = ChunkCopier(pool.blocks, store.arena, blocks_per_chunk)
    if blocks_per_chunk < manager.pool.num_usable:
        seconds = copier.seconds_per_chunk(range(1, blocks_per_chunk + 1))
        store.loaded(config.tokens_per_chunk, seconds)
    return store, LowerTiers(
        store,
        copier,
        manager,
        clock=time.monotonic,
        token_seconds=lambda: meter.prefill_seconds_per_token,
    )


def _scheduler(
    card: ModelCard,
    manager: KVCacheManager,
    max_waiting: int,
    lower_tiers: LowerTiers | None,
    grammars: GrammarHolder,
    promise: StepPromise | None,
) -> Scheduler:
    return Scheduler(
        manager,
        max_batched_tokens=card.max_batched_tokens,
        max_running=card.max_running,
        max_waiting=max_waiting,
        context_length=card.context_length,
        vocab_size=card.vocab_size,
        eos_token_ids=card.eos_token_ids,
        lower_tiers=lower_tiers,
        constraints=grammars,
        promise=promise,
    )
