"""SimulatedEngine: the real scheduler and block pool over a cost model instead of a model.

Owns the tokens of answers: a script's if it has one for the prompt, else arbitrary ones; under a grammar only
allowed ones. Nothing is computed, and time is the given `sleep`. It reads images' headers, and each prompt
encodes its own anew. A sparse model's cache is divided into groups of layers. For load tests of the router
and for planning; its figures say nothing about a real engine.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from replicas.engine import EngineRequest, RequestRefused, SharedKv
from replicas.grammars.constraint import Constraints
from replicas.kvcache.cache_groups import CacheGroup
from replicas.media.encoding import Encoding
from replicas.media.holding import held_images, release_images
from replicas.media.image_cache import CachedImage, ImageCache
from replicas.protocol.frames import LoadSnapshot, RequestKey, StepFrame, TokenLogprobs
from replicas.protocol.hand_overs import StoreQuestion
from replicas.protocol.image_rules import ImageRule, rule_on_card
from replicas.protocol.images import ImageError, media_hash, read_size
from replicas.protocol.media import ImageQuery, ImageQueryAnswer
from replicas.protocol.status import ModelCard
from replicas.scheduling.kvcache_manager import KVCacheManager
from replicas.scheduling.request import Chunk, Request, SampledToken
from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.step_promise import open_promise, work_of
from replicas.simulated_engine.grouped_cache import GroupedCache
from replicas.simulated_engine.grouped_manager import GroupedManager
from replicas.simulated_engine.hardware import FREE, CostModel
from replicas.simulated_engine.script import Script

_PAUSE_SECONDS = 0.0005
"""How long a step waits in which every request waits for its grammar."""
_MASK = 2**64 - 1


class _Looker(NamedTuple):
    """A request with images, and how far they are encoded."""

    request: EngineRequest
    encoding: Encoding


class SimulatedEngine:
    """`num_blocks` counts the null block. `groups` are those of a sparse model. `printable` narrows the token
    ids of answers, EOS left out. Without `constraints`, requests with a grammar are refused."""

    def __init__(
        self,
        card: ModelCard,
        cost: CostModel,
        *,
        num_blocks: int,
        max_batched_tokens: int,
        max_running: int,
        max_waiting: int,
        sleep: Callable[[float], None],
        printable: Sequence[int] | None = None,
        script: Script | None = None,
        constraints: Constraints | None = None,
        image_bytes: int = 0,
        groups: Sequence[CacheGroup] = (),
        slo_tpot: float | None = None,
    ) -> None:
        self._rule = rule_on_card(card.image_rule)
        self._images = None if self._rule is None else ImageCache[None](image_bytes)
        self._media_answers: list[ImageQueryAnswer] = []
        self._lookers: dict[RequestKey, _Looker] = {}
        """Requests with images."""
        self._constraints = constraints
        self._script = script
        self._answers: dict[RequestKey, Sequence[int]] = {}
        """The script's answers for requests that run or wait."""
        self._card = card
        self._cost = cost if cost != FREE else None
        self._sleep = sleep
        candidates = range(card.vocab_size) if printable is None else printable
        self._token_ids = tuple(token for token in candidates if token not in card.eos_token_ids)
        if not self._token_ids or not 0 <= min(self._token_ids) <= max(self._token_ids) < card.vocab_size:
            raise ValueError(
                f"{len(candidates)} token ids leave none of a vocabulary of {card.vocab_size} to answer with"
            )
        self._promise = (
            None if self._cost is None else open_promise(slo_tpot, card.block_size if groups else 1)
        )
        self._scheduler = Scheduler(
            _manager(card, num_blocks, groups, max_batched_tokens),
            max_batched_tokens=max_batched_tokens,
            max_running=max_running,
            max_waiting=max_waiting,
            context_length=card.context_length,
            vocab_size=card.vocab_size,
            eos_token_ids=card.eos_token_ids,
            constraints=constraints,
            promise=self._promise,
        )

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def shared_kv(self) -> SharedKv | None:
        return None

    def begin(self, wake: Callable[[], None]) -> None:
        """No earlier life has left anything."""

    def add(self, request: EngineRequest) -> None:
        held_images(self._images, request, self._card.name)
        try:
            self._scheduler.add(request)
        except RequestRefused:
            release_images(self._images, request)
            raise
        if request.submit.media:
            num_tokens = len(request.token_ids)
            num_ready = num_tokens - (request.submit.num_expected_tokens or num_tokens)
            self._lookers[request.key] = _Looker(request, Encoding(request.submit.media, num_ready))
        if self._script is not None:
            num_prompt_tokens = len(request.token_ids) - request.submit.num_output_tokens
            answer = self._script.answer(request.token_ids[:num_prompt_tokens])
            if answer is not None:
                self._answers[request.key] = answer

    def abort(self, key: RequestKey) -> None:
        self._scheduler.abort(key)
        self._forget(key)

    def _forget(self, key: RequestKey) -> None:
        self._answers.pop(key, None)
        looker = self._lookers.pop(key, None)
        if looker is not None:
            release_images(self._images, looker.request)

    def ask_store(self, question: StoreQuestion) -> None:
        """It has none."""

    def take_media(self, question: ImageQuery) -> None:
        if self._images is not None and self._rule is not None:
            self._media_answers.append(_taken(self._images, self._rule, question))

    def has_work(self) -> bool:
        return self._scheduler.has_work() or bool(self._media_answers)

    def step(self) -> StepFrame:
        chunks = self._scheduler.schedule()
        if not chunks and self._scheduler.has_work():
            self._scheduler.wait(_PAUSE_SECONDS)
        num_encoded_tokens = self._num_encoded(chunks) if self._lookers else 0
        if self._cost is not None:
            seconds = self._cost.step_seconds(chunks) + num_encoded_tokens * self._cost.encode
            if seconds > 0:
                self._sleep(seconds)
            if self._promise is not None:
                self._promise.observe(work_of(chunks), seconds)
        sampled = {chunk.request.key: self._sample(chunk.request) for chunk in chunks if chunk.samples}
        frame = self._scheduler.finish_step(chunks, sampled)
        for delta in frame.deltas:
            if delta.finish_reason is not None:
                self._forget(delta.key)
        if self._images is None:
            return frame
        answers, self._media_answers = self._media_answers, []
        return replace(
            frame,
            media=answers,
            num_encoded_tokens=num_encoded_tokens,
            load=self._with_images(frame.load),
        )

    def _num_encoded(self, chunks: Sequence[Chunk]) -> int:
        return sum(
            self._lookers[chunk.request.key].encoding.encode(chunk.start, chunk.start + chunk.num_tokens)
            for chunk in chunks
            if not chunk.is_decode and chunk.request.key in self._lookers
        )

    def _with_images(self, load: LoadSnapshot) -> LoadSnapshot:
        num_left = sum(looker.encoding.num_tokens_left for looker in self._lookers.values())
        return replace(load, num_pending_image_tokens=num_left) if num_left else load

    def reset_prefix_cache(self) -> bool:
        if self._images is not None:
            self._images.clear()
        return self._scheduler.reset_prefix_cache()

    def close(self) -> None:
        if self._constraints is not None:
            self._constraints.close()

    def _sample(self, request: Request) -> SampledToken:
        token_id = self._scripted(request)
        if token_id is None or (
            request.constraint is not None and token_id not in request.constraint.allowed()
        ):
            token_id = self._arbitrary(request)
        if request.sampling.num_logprobs is None:
            return SampledToken(token_id)
        top = ((token_id, 0.0),) if request.sampling.num_logprobs else ()
        return SampledToken(token_id, TokenLogprobs(token_id, 0.0, top))

    def _scripted(self, request: Request) -> int | None:
        """Return the script's next token; None if it has none, or has ended and may not stop yet."""
        answer = self._answers.get(request.key)
        if self._script is None or answer is None:
            return None
        num_said, sampling = request.num_output_tokens, request.sampling
        if num_said < len(answer):
            return answer[num_said]
        may_end = num_said + 1 >= sampling.min_tokens and not sampling.ignore_eos
        return self._script.end if may_end else None

    def _arbitrary(self, request: Request) -> int:
        """Return the n-th output token, from the choice's seed and n alone: the same wherever it is
        resumed."""
        mixed = (request.seed * 0x9E3779B97F4A7C15 + request.num_output_tokens * 0xD1B54A32D192ED03) & _MASK
        mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & _MASK
        candidates = self._token_ids if request.constraint is None else request.constraint.allowed()
        return candidates[(mixed >> 20) % len(candidates)]


def _manager(
    card: ModelCard, num_blocks: int, groups: Sequence[CacheGroup], max_batched_tokens: int
) -> KVCacheManager:
    if not groups:
        return KVCacheManager(num_blocks, card.block_size)
    cache = GroupedCache(
        num_blocks, groups, max_batched_tokens=max_batched_tokens, retention=card.retention_interval
    )
    assert card.is_sparse and card.block_size == cache.alignment
    return GroupedManager(cache)


def _taken(images: ImageCache[None], rule: ImageRule, question: ImageQuery) -> ImageQueryAnswer:
    content_hash = media_hash(question.root, question.content)
    try:
        token_ids = rule.tokens_of(read_size(question.content))
    except ImageError as error:
        return ImageQueryAnswer(question.number, problem=str(error))
    if not images.put(content_hash, CachedImage(token_ids, len(question.content), None)):
        return ImageQueryAnswer(question.number, is_full=True)
    return ImageQueryAnswer(question.number, content_hash)
