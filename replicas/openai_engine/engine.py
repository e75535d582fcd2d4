"""OpenAiEngine: a server that takes bodies behind the Engine protocol.

Owns the requests that are at the server, by name, and what has come since the last step. HTTP has a thread of
its own, which only appends; everything else happens in the engine's thread.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from replicas.checkpoints.text_sizes import read_text_sizes
from replicas.checkpoints.weights import tokenizer_bundle
from replicas.config import ReplicaConfig
from replicas.engine import EngineRequest, RequestRefused, SharedKv
from replicas.errors import StartupError
from replicas.kvstore.leasing.lease_outcome import without_tiers
from replicas.kvstore.rate import DECAY
from replicas.openai_engine.bodies import PassedBody, Read, SentBody, body_to_send
from replicas.openai_engine.byte_text import NUM_BYTES, byte_bundle
from replicas.openai_engine.upstream import Alive, Answered, BodyPiece, BodyServer
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import CacheEvent
from replicas.protocol.frames import (
    BodyForm,
    FinishReason,
    LoadSnapshot,
    PromptUsage,
    RefusalCode,
    RequestKey,
    StepFrame,
    Submit,
    TokenDelta,
)
from replicas.protocol.hand_overs import StoreQuestion
from replicas.protocol.media import ImageQuery
from replicas.protocol.passed_routes import with_model
from replicas.protocol.status import ModelCard, Role, TokenizerBundle
from replicas.remote_engine.believed import BelievedResidency
from replicas.remote_engine.facts import declared_fingerprint
from replicas.remote_engine.live_requests import LiveRequest, LiveRequests
from replicas.remote_engine.model_list import MODELS_PATH, read_models, with_names
from replicas.remote_engine.refusals import RefusalLog
from replicas.remote_engine.server import Ended, Listed, Unreachable, Watched, endpoint_of, read_key

logger = logging.getLogger(__name__)

BLOCK_SIZE = 64
NUM_BLOCKS = 8192
"""Unless a setting says otherwise: a server does not tell how much it keeps."""
UNTOLD_CONTEXT = 2**20
"""For a server that does not tell its context: it refuses longer prompts by itself."""
MOST_BYTES_PER_TOKEN = 32
"""No prompt that fits has more."""

SALTED = ("kvasir", "sglang", "vllm")
"""Owners of models, as servers list them, whose servers part their cache by a body's `cache_salt`."""

MOST_STEP_BYTES = 32 * 2**20
"""A frame has a piece more than this at most. Routers read up to MAX_SERVER_FRAME_BYTES."""

News = BodyPiece | Answered | Ended | Alive | Listed | Unreachable


@dataclass(slots=True)
class _LiveBody(LiveRequest):
    chain: list[BlockHash] = field(default_factory=list)
    num_believed: int = 0
    """Blocks of the chain that the server was believed to hold before it began."""
    has_place: bool = True
    """It had not to wait for another one to end."""


class OpenAiEngine:
    """Raises CheckpointError, SettingsError or StartupError. Waits for the server to answer."""

    def __init__(self, config: ReplicaConfig) -> None:
        assert config.engine_url is not None
        self._news: deque[News] = deque()
        self._is_woken = False
        self._wake: Callable[[], None] | None = None
        self._server = BodyServer(
            config.engine_url, key=read_key(config.engine_key_file), rank=None, tell=self._tell
        )
        try:
            self._attach(config, time.monotonic() + config.build_seconds)
        except BaseException:
            self._server.close()
            raise

    def _attach(self, config: ReplicaConfig, deadline: float) -> None:
        self._server.wait(deadline, MODELS_PATH)
        served = read_models(self._server.ask(MODELS_PATH), config.engine_model)
        forms = self._server.forms(served.served_name)
        if config.routes:
            forms = (*forms, BodyForm.PASSED)
        if not forms:
            raise StartupError(f"{self._server.url} takes no bodies of OpenAI's or Anthropic's forms")
        directory = None if config.model is None else Path(config.model)
        self._bundle = byte_bundle() if directory is None else tokenizer_bundle(directory)
        told = context = served.context_length or UNTOLD_CONTEXT
        if directory is None:
            context *= MOST_BYTES_PER_TOKEN
        context = min(context, config.context_length or context)
        self._server.served_name = served.served_name
        self._takes_salt = served.owned_by in SALTED
        self._card = ModelCard(
            name=config.model_name or served.served_name,
            fingerprint=declared_fingerprint(
                "\0".join([served.served_name, *sorted(config.routes)]), self._bundle.files
            ),
            engine="openai",
            block_size=config.block_size or BLOCK_SIZE,
            num_blocks=config.num_blocks or NUM_BLOCKS,
            context_length=context,
            vocab_size=NUM_BYTES if directory is None else read_text_sizes(directory).vocab_size,
            max_running=config.max_running,
            takes_published=False,
            endpoint=endpoint_of(self._server.url, config, served) if config.routes else "",
            routes=config.routes,
            takes_bodies=forms,
            told_context=min(told, context) if directory is None else 0,
            role=Role(config.role),
        )
        self._card = with_names(self._card, served)
        self._live: LiveRequests[_LiveBody] = LiveRequests(config.max_waiting)
        self._refusals = RefusalLog(logger)
        self._ready: list[TokenDelta] = []
        self._events: list[CacheEvent] = []
        self._num_places = self._server.num_places()
        self._place_seconds = 0.0
        self._residency = BelievedResidency(self._card.block_size, self._card.num_blocks)
        self._watched = Watched(config.engine_hang_seconds)
        self._server.start()

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def shared_kv(self) -> SharedKv | None:
        return None

    def bundle(self) -> TokenizerBundle:
        return self._bundle

    def begin(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        wake()

    def add(self, request: EngineRequest) -> None:
        submit = request.submit
        if not submit.body or submit.body_form not in self._card.takes_bodies:
            raise RequestRefused(RefusalCode.INVALID_REQUEST, "the server takes a client's body, not tokens")
        name = _name(request.key)
        self._live.check_room(name, request.key)
        try:
            sent = self._sent(submit, submit.body_form)
        except ValueError as error:
            raise RequestRefused(RefusalCode.INVALID_REQUEST, f"the body cannot be read: {error}") from error
        has_place = not self._num_places or len(self._live) < self._num_places
        self._live.add(name, _LiveBody(request, has_place=has_place))
        self._server.submit(name, sent)

    def _sent(self, submit: Submit, form: BodyForm) -> SentBody | PassedBody:
        """Raises ValueError."""
        served_name = submit.adapter or self._server.served_name
        if form is not BodyForm.PASSED:
            salt = submit.root.hex() if self._takes_salt else None
            return body_to_send(form, submit.body, served_name, salt=salt, refused=self._server.refused)
        if submit.route not in self._card.routes:
            raise ValueError(f"{submit.route} is not passed on here")
        body = with_model(submit.content_type, submit.body, served_name)
        return PassedBody(submit.route, body, submit.content_type)

    def abort(self, key: RequestKey) -> None:
        if self._live.pop(_name(key)) is not None:
            self._server.abort(_name(key))

    def ask_store(self, question: StoreQuestion) -> None:
        """It has none."""

    def take_media(self, question: ImageQuery) -> None:
        """Its card has no rule for images."""

    def has_work(self) -> bool:
        return bool(self._news)

    def step(self) -> StepFrame:
        """Raises EngineDied once the server is gone or hangs."""
        self._is_woken = False
        num_bytes = 0
        while self._news and num_bytes < MOST_STEP_BYTES:
            news = self._news.popleft()
            match news:
                case BodyPiece():
                    num_bytes += len(news.content)
                    self._take(news)
                case Answered():
                    self._end(news)
                case Ended():
                    self._fail(news)
                case Alive():
                    self._watched.seen()
                case Listed():
                    self._watched.seen()
                    self._card = with_names(self._card, news.model)
                case Unreachable():
                    self._watched.missed(news)
        deltas, self._ready = self._ready, []
        events, self._events = self._events, []
        return StepFrame(deltas, events, self._load(), started=self._live.take_started())

    def reset_prefix_cache(self) -> bool:
        return not self._live

    def close(self) -> None:
        self._server.close()

    def _tell(self, news: News) -> None:
        """In the thread of HTTP."""
        self._news.append(news)
        if not self._is_woken:  # `step` resets it before it looks, so nothing stays unseen
            self._is_woken = True
            if self._wake is not None:
                self._wake()

    def _take(self, piece: BodyPiece) -> None:
        self._watched.seen()
        live = self._live.get(piece.name)
        if live is not None:
            if self._live.came(live, 1, piece.at):
                self._is_computed(live)
            live.num_output_tokens += piece.num_tokens
            self._ready.append(TokenDelta(live.request.key, body=piece.content, num_counted=piece.num_tokens))

    def _end(self, answered: Answered) -> None:
        live = self._live.pop(answered.name)
        if live is None:
            return
        if live.has_place:
            seconds = time.monotonic() - live.added_at
            self._place_seconds = DECAY * (self._place_seconds or seconds) + (1 - DECAY) * seconds
        read = answered.read
        self._ready.append(
            TokenDelta(
                live.request.key,
                finish_reason=read.finish,
                usage=self._usage_of(live, read),
                num_counted=max(0, (read.num_output_tokens or 0) - live.num_output_tokens),
            )
        )

    def _fail(self, ended: Ended) -> None:
        live = self._live.pop(ended.name)
        if live is not None:
            assert ended.refusal is not None
            refusal = ended.refusal
            self._refusals.say(refusal, live.request.submit.request_id)
            delta = TokenDelta(live.request.key, finish_reason=FinishReason.ERROR, refusal=refusal)
            self._ready.append(delta)

    def _is_computed(self, live: _LiveBody) -> None:
        """The server has the blocks of a prompt."""
        submit = live.request.submit
        live.chain = hash_blocks(submit.root, live.request.token_ids, self._card.block_size)
        live.num_believed = self._residency.num_leading(live.chain)
        self._events += self._residency.computed(live.chain, len(live.chain), submit.user)

    def _usage_of(self, live: _LiveBody, read: Read) -> PromptUsage:
        """In tokens of ours, of which the prompt may have another number than of the server's."""
        request, size = live.request, self._card.block_size
        if request.submit.route:  # its tokens are the server's alone
            return PromptUsage(read.num_prompt_tokens or 0, None, 0)
        num_tokens, num_cached = len(request.token_ids), None
        if read.num_cached_tokens is not None and read.num_prompt_tokens:
            share = min(1.0, read.num_cached_tokens / read.num_prompt_tokens)
            num_cached = int(share * num_tokens)
        chain, user = live.chain, request.submit.user
        if num_cached is not None and num_cached // size < min(live.num_believed, (num_tokens - 1) // size):
            self._events += self._residency.corrected(chain, num_cached // size, user)
        if read.prompt_seconds is not None:
            self._live.computed(num_tokens - (num_cached or 0), read.prompt_seconds)
        elif live.first_at and live.has_place:
            self._live.computed(num_tokens - (num_cached or 0), live.first_at - live.submitted_at)
        return PromptUsage(
            num_prompt_tokens=num_tokens,
            num_cached_tokens=num_cached,
            num_written_tokens=0 if num_cached is None else max(0, num_tokens // size * size - num_cached),
            leases=without_tiers(request.submit.leases).answers,
            answer_id=read.answer_id,
        )

    def _load(self) -> LoadSnapshot:
        return self._live.load(
            num_cached_blocks=self._residency.num_copies,
            num_total_blocks=self._card.num_blocks,
            is_predicted=True,
            num_places=self._num_places,
            place_seconds=self._seconds_of_a_place() if self._num_places else 0.0,
        )

    def _seconds_of_a_place(self) -> float:
        """By the answers that have ended, or by those that have taken longer already."""
        now = time.monotonic()
        ages = [now - live.added_at for live in self._live.values() if live.has_place]
        return max(self._place_seconds, sum(ages) / len(ages) if ages else 0.0)


def _name(key: RequestKey) -> str:
    return f"{key.number}-{key.choice}"
