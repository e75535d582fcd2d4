"""RemoteEngine: a server that runs already behind the Engine protocol.

Owns the requests that are at the server, by name, and what has come since the last step. HTTP and events have
threads of their own, which only append; everything else happens in the engine's thread. A step gathers what
has come into one frame and never waits. Before `begin` there is no `wake` to call: each step takes a moment.
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from replicas.checkpoints.model_config import read_eos_token_ids
from replicas.checkpoints.sampling_defaults import read_sampling_defaults
from replicas.checkpoints.text_sizes import read_text_sizes
from replicas.checkpoints.weights import tokenizer_bundle
from replicas.config import ReplicaConfig
from replicas.engine import EngineRequest, SharedKv
from replicas.errors import EngineDied, StartupError
from replicas.kvcache.writers import NO_SHARES
from replicas.kvstore.leasing.lease_outcome import without_tiers
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.bounds import shown
from replicas.protocol.events import BlockRemoved, BlockStored, CacheEvent
from replicas.protocol.frames import (
    NO_USER,
    FinishReason,
    LoadSnapshot,
    PromptUsage,
    Refusal,
    RefusalCode,
    RequestKey,
    StepFrame,
    TokenDelta,
)
from replicas.protocol.hand_overs import StoreQuestion
from replicas.protocol.media import ImageQuery
from replicas.protocol.sampling_defaults import SamplingDefaults
from replicas.protocol.status import ModelCard, Role, SplitWay, TokenizerBundle
from replicas.remote_engine.believed import BelievedResidency
from replicas.remote_engine.dialect import Delta, Dialect
from replicas.remote_engine.event_feed import EventFeed, Events, Restarted
from replicas.remote_engine.facts import (
    EventSource,
    ServerLoad,
    ServerModel,
    declared_fingerprint,
    is_of_own_host,
)
from replicas.remote_engine.live_requests import LiveRequest, LiveRequests
from replicas.remote_engine.model_list import with_names
from replicas.remote_engine.nixl import NixlParts, SecondPart
from replicas.remote_engine.probes import check_tokenizer, find_dialect
from replicas.remote_engine.refusals import RefusalLog
from replicas.remote_engine.residency import ServerResidency, Stored
from replicas.remote_engine.server import (
    Ended,
    Listed,
    Looked,
    Piece,
    Sent,
    Server,
    Unreachable,
    Watched,
    endpoint_of,
    read_key,
)
from replicas.scheduling.admission import AdmissionLimits, check_admission
from replicas.toy_model import checkpoint_directory

logger = logging.getLogger(__name__)

News = Piece | Ended | Looked | Listed | Unreachable | Events | Restarted

PROOF_STEP_SECONDS = 0.05
"""How long a step takes before `begin`. A proof has a number of them, and the server may be busy."""

ELSEWHERE = "which is not the server's own host; setting engine_events_elsewhere takes other addresses"

EVENT_SECONDS = 20.0
"""How long the end of a proof's request waits for the events of its blocks."""

LEAST_MEASURED_TOKENS = 256
"""A first token costs a step, however short the prompt: a shorter one counts as this long for the speed.
Otherwise a server that computes nothing longer, since others compute its prompts, would look slow."""

MOST_EMPTY_EVENTS = 1024
"""Events of an answer beyond one for each token."""


@dataclass(slots=True)
class _LiveSubmit(LiveRequest):
    """`finish` waits for the usage, which comes after it."""

    output_token_ids: list[int] = field(default_factory=list)
    chain: list[BlockHash] | None = None
    """The prompt's blocks, once they are believed to be held."""
    num_believed: int = 0
    """How many of them were believed to be held before."""
    finish: FinishReason | None = None
    num_cached_tokens: object = None
    """The server's word, whatever it is."""
    handover: bytes = b""
    second_part: SecondPart | None = None
    behind: list[tuple[str, Sent]] = field(default_factory=list)
    """Other choices of the prompt, which are sent once this one has its first token."""

    @property
    def is_handed_over(self) -> bool:
        """Whether its prompt was computed at another server, whose count of cached tokens this one gives."""
        return self.second_part is not None and self.second_part.is_sent

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids) - self.request.submit.num_output_tokens


class RemoteEngine:
    """Raises CheckpointError, SettingsError or StartupError. Waits for the server to answer."""

    def __init__(self, config: ReplicaConfig) -> None:
        assert config.engine_url is not None
        self._attachment = secrets.token_hex(4)
        self._news: deque[News] = deque()
        self._is_woken = False
        self._wake: Callable[[], None] | None = None
        self._server = Server(
            config.engine_url, key=read_key(config.engine_key_file), rank=config.engine_rank, tell=self._tell
        )
        try:
            self._attach(config, time.monotonic() + config.build_seconds)
        except BaseException:
            self._server.close()
            raise

    def _attach(self, config: ReplicaConfig, deadline: float) -> None:
        server = self._server
        server.wait(deadline)
        directory = checkpoint_directory(config.model)
        self._bundle = tokenizer_bundle(directory)
        self._dialect = dialect = find_dialect(
            server.ask,
            server.url,
            rank=config.engine_rank,
            served_name=config.engine_model,
            block_size=config.block_size,
        )
        self._seen = _first_look(dialect, server)
        self._watched = Watched(config.engine_hang_seconds)
        self._nixl = None if config.kv_connector is None else NixlParts(config.kv_lease_seconds)
        if self._nixl is not None and dialect.why_no_nixl:
            raise StartupError(f"setting kv_connector is for vLLM: {dialect.why_no_nixl}")
        sizes = read_text_sizes(directory)
        self._is_sparse = sizes.is_sparse
        self._card = self._model_card(config, directory, sizes.vocab_size)
        check_tokenizer(server.ask, dialect.model.served_name, self._bundle)
        self._limits = AdmissionLimits(
            self._card.context_length,
            self._card.num_cache_tokens,
            self._card.vocab_size,
        )
        self._take_names(dialect.model)
        self._live: LiveRequests[_LiveSubmit] = LiveRequests(config.max_waiting)
        self._refusals = RefusalLog(logger)
        self._ready: list[TokenDelta] = []
        self._stored_since_add, self._added_at = False, 0.0
        self._ended: list[Ended] = []
        self._unsaid: list[CacheEvent] = []
        self._predicted: list[CacheEvent] = []
        self._has_warned = False
        self._awaited: set[BlockHash] = set()
        self._proof: set[BlockHash] = set()
        self._residency = ServerResidency(*dialect.sizes)
        self._believed: BelievedResidency | None = None
        source, why = dialect.source, f"it publishes none: {dialect.advice}"
        if source is not None and not config.engine_events_elsewhere:
            why = f"they go to {shown(source.endpoint)}, {ELSEWHERE}"
            source = self._on_its_host(source)
        self._feed = None if source is None else EventFeed(source, dialect.cache_event, self._tell)
        if source is None:
            self._believe(why)
        self._server.speak(dialect)
        self._server.start()

    def _on_its_host(self, source: EventSource) -> EventSource | None:
        """Return the part of its event source that is on the server's own host."""
        if not (source.binds and is_of_own_host(source.endpoint, self._server.url)):
            return None
        replay = source.replay_endpoint
        if replay is not None and not is_of_own_host(replay, self._server.url):
            logger.warning("missed events are not asked for at %s, %s", shown(replay), ELSEWHERE)
            return replace(source, replay_endpoint=None)
        return source

    def _model_card(self, config: ReplicaConfig, directory: Path, vocab_size: int) -> ModelCard:
        model, sizes = self._dialect.model, self._dialect.sizes
        assert model.context_length is not None
        if config.block_size not in (None, sizes.block_size):
            raise StartupError(
                f"the server's blocks have {sizes.block_size} tokens, and setting block_size is"
                f" {config.block_size}"
            )
        defaults = read_sampling_defaults(config, directory, self._dialect.defaults_in_file)
        if defaults is None and config.sampling_defaults == "model":
            defaults = SamplingDefaults()  # all are the server's own
        return ModelCard(
            name=config.model_name or model.served_name,
            fingerprint=declared_fingerprint(model.root, self._bundle.files),
            engine="remote",
            block_size=sizes.block_size,
            num_blocks=sizes.num_blocks,
            context_length=min(config.context_length or model.context_length, model.context_length),
            vocab_size=vocab_size,
            eos_token_ids=read_eos_token_ids(directory),
            max_batched_tokens=config.tokens_per_step,
            max_running=config.max_running,
            takes_published=False,
            endpoint=endpoint_of(self._server.url, config, model),
            endpoint_rank=config.engine_rank,
            sampling_defaults=defaults,
            role=Role(config.role),
            splits_by=SplitWay.NONE if self._nixl is None else SplitWay.NIXL,
        )

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def shared_kv(self) -> SharedKv | None:
        return None

    def bundle(self) -> TokenizerBundle:
        """Return the files that the model's text goes through."""
        return self._bundle

    def begin(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        wake()

    def add(self, request: EngineRequest) -> None:
        check_admission(request, self._limits)
        name = self._name(request.key)
        self._live.check_room(name, request.key)
        sent = self._sent(request, name)
        live = _LiveSubmit(request, second_part=sent.second_part)
        self._live.add(name, live)
        self._residency.expect(name, request.submit.user, live.num_prompt_tokens)
        if self._wake is None:
            self._awaited = {*hash_blocks(request.submit.root, request.token_ids, self._card.block_size)}
        self._stored_since_add, self._added_at = False, time.monotonic()
        first: _LiveSubmit | None = None
        if self._nixl is not None and request.key.choice:
            first = self._live.get(self._name(RequestKey(request.key.number, 0)))
        if first is not None and first.second_part is not None and not first.first_at:
            first.behind.append((name, sent))
        else:
            self._server.submit(name, sent)

    def _sent(self, request: EngineRequest, name: str) -> Sent:
        """Raises RequestRefused."""
        submit, dialect = request.submit, self._dialect
        body, read = dialect.body(request, name, self._card.eos_token_ids), dialect.reader(request)
        most_events = MOST_EMPTY_EVENTS + request.sampling.max_tokens - submit.num_output_tokens
        sent = Sent(body, read, dialect.most_bytes(request), most_events)
        if self._nixl is not None and submit.split_id:
            body, read = self._nixl.first_body(body, submit), self._nixl.first_reader(submit, read)
            return sent._replace(body=body, read=read, is_whole=True)
        if self._nixl is not None and submit.handover:
            return sent._replace(second_part=self._nixl.second_part(request))
        return sent

    def _send_those_behind(self, live: _LiveSubmit) -> None:
        behind, live.behind = live.behind, []
        for name, sent in behind:
            if name in self._live:
                self._server.submit(name, sent)

    def abort(self, key: RequestKey) -> None:
        live = self._live.pop(self._name(key))
        if live is not None:
            self._server.abort(self._name(key))
            self._send_those_behind(live)

    def ask_store(self, question: StoreQuestion) -> None:
        """It has none."""

    def take_media(self, question: ImageQuery) -> None:
        """Its card has no rule for images."""

    def has_work(self) -> bool:
        return bool(self._news) or (self._wake is not None and bool(self._unsaid))

    def step(self) -> StepFrame:
        """Raises EngineDied once the server is gone, was started anew, or hangs."""
        if self._wake is None:
            time.sleep(PROOF_STEP_SECONDS)
        self._is_woken = False
        events: list[CacheEvent] = []
        if self._wake is not None and self._unsaid:
            events, self._unsaid = self._unsaid, []
        while self._news:
            news = self._news.popleft()
            match news:
                case Piece():
                    self._take(news)
                case Ended():
                    self._ended.append(news)
                case Events() if self._believed is None:
                    events += self._follow(news)
                case Looked():
                    self._look(news.load)
                case Listed():
                    self._take_names(news.model)
                case Unreachable():
                    self._watched.missed(news)
                case Restarted():
                    raise EngineDied("the server was started anew")
        while self._ended and not self._awaits_events():
            self._end(self._ended.pop(0))
        events += self._take_believed()
        deltas, self._ready = self._ready, []
        return StepFrame(deltas, events, self._load(), started=self._live.take_started())

    def reset_prefix_cache(self) -> bool:
        """Clear nothing: a server keeps what the proof has stored, under a root of its own."""
        if self._believed is not None:
            self._believed.clear()
        return not self._live

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
        self._server.close()

    def _name(self, key: RequestKey) -> str:
        """Name a request so that no earlier attachment has used it: replayed events carry names as well."""
        return f"{self._attachment}-{key.number}-{key.choice}"

    # What comes.

    def _tell(self, news: News) -> None:
        """In the thread of HTTP or of events."""
        self._news.append(news)
        if not self._is_woken:  # `step` resets it before it looks, so nothing stays unseen
            self._is_woken = True
            if self._wake is not None:
                self._wake()

    def _awaits_events(self) -> bool:
        """In the proof, whether the blocks of the request that has ended are still to be reported. Where none
        are in time, they are predicted from then on."""
        if self._wake is not None or self._stored_since_add or self._believed is not None:
            return False
        if time.monotonic() > self._added_at + EVENT_SECONDS:
            assert self._dialect.source is not None
            self._believe(f"none came of the probe prompt from {self._dialect.source.endpoint}")
        return self._believed is None

    def _follow(self, news: Events) -> list[CacheEvent]:
        """Translate a batch. Before `begin` only the proof's own blocks are reported, and never again."""
        events: list[CacheEvent] = []
        if news.after_gap:
            events.append(self._residency.clear())
        if self._wake is not None:
            events += self._residency.apply(news.events)
            if self._residency.complaint is not None:
                self._believe(self._residency.complaint)
                return [self._residency.clear()]
            return self._without_proof(events) if self._proof else events
        for event in news.events:
            translated = self._residency.apply((event,))
            if isinstance(event, Stored) and self._is_proof(event, translated):
                self._stored_since_add = True
                events += translated
                self._proof.update(each for stored in translated for each in _stored_in(stored))
            else:
                self._unsaid += translated
        if self._residency.complaint is not None:
            self._believe(self._residency.complaint)
        return events

    def _is_proof(self, event: Stored, translated: Sequence[CacheEvent]) -> bool:
        """Recognise the blocks of the proof's request by its name; by their own if the server tells none."""
        if event.session_id is not None:
            return self._residency.expects(event.session_id)
        return any(not self._awaited.isdisjoint(_stored_in(stored)) for stored in translated)

    def _believe(self, why: str) -> None:
        """From now on predict what the server holds: its cache events do not say."""
        self._is_sparse |= self._residency.has_groups
        logger.warning("what the server holds is predicted, since its cache events do not say: %s", why)
        self._unsaid.clear()
        self._believed = BelievedResidency(self._card.block_size, self._card.num_blocks)

    def _is_computed(self, live: _LiveSubmit) -> None:
        """The server has the blocks of a prompt."""
        if self._believed is None or live.chain is not None:
            return
        submit, size = live.request.submit, self._card.block_size
        live.chain = hash_blocks(submit.root, live.request.token_ids, size)
        live.num_believed = self._believed.num_leading(live.chain)
        num_prompt_blocks = live.num_prompt_tokens // size
        self._predicted += self._believed.computed(live.chain, num_prompt_blocks, submit.user)

    def _is_answered(self, live: _LiveSubmit) -> None:
        """It has those of the answer too, all of whose tokens but the last were computed."""
        self._is_computed(live)
        if self._believed is None or live.chain is None:
            return
        submit, size = live.request.submit, self._card.block_size
        num_reusable = (len(live.request.token_ids) - 1) // size
        told = self._num_told(live)
        if self._is_sparse or live.is_handed_over:
            told = None  # a shorter hit is of what was never kept here, and says nothing of other prompts
        if told is not None and told // size < min(live.num_believed, num_reusable):
            self._predicted += self._believed.corrected(live.chain, told // size, submit.user)
        if len(live.output_token_ids) < live.num_output_tokens:
            return  # it was predicted only from some token on
        start = len(live.chain) * size
        rest = [*live.request.token_ids[start:], *live.output_token_ids[:-1]]
        parent = live.chain[-1] if live.chain else None
        more = hash_blocks(submit.root, rest[: len(rest) // size * size], size, parent=parent)
        if more:
            num_prompt_blocks = live.num_prompt_tokens // size
            chain = live.chain + more
            self._predicted += self._believed.computed(chain, num_prompt_blocks, submit.user)

    def _take_believed(self) -> list[CacheEvent]:
        predicted, self._predicted = self._predicted, []
        return predicted

    def _without_proof(self, events: Sequence[CacheEvent]) -> list[CacheEvent]:
        """Leave out removals of the proof's blocks, of which routers were never told."""
        kept: list[CacheEvent] = []
        for event in events:
            if isinstance(event, BlockRemoved) and not self._proof.isdisjoint(event.block_hashes):
                rest = tuple(each for each in event.block_hashes if each not in self._proof)
                self._proof.difference_update(event.block_hashes)
                if not rest:
                    continue
                event = BlockRemoved(rest, event.tier, event.reason)
            kept.append(event)
        return kept

    def _take(self, piece: Piece) -> None:
        live = self._live.get(piece.name)
        if live is None:
            return
        chunk = piece.chunk
        if chunk.refusal is not None:
            refusal = chunk.refusal
            if live.num_output_tokens:  # it was taken, so it may go on elsewhere, whatever servers call it
                refusal = Refusal(RefusalCode.INTERNAL, refusal.message, refusal.error)
            self._fail(piece.name, refusal)
            return
        if chunk.num_cached_tokens is not None:
            live.num_cached_tokens = chunk.num_cached_tokens
        live.handover = live.handover or chunk.handover
        for delta in chunk.deltas:
            if piece.name in self._live:  # an earlier one may have ended the request
                self._take_delta(piece.name, live, delta, piece.at)

    def _take_delta(self, name: str, live: _LiveSubmit, delta: Delta, at: float) -> None:
        token_ids = delta.token_ids
        if live.num_output_tokens + len(token_ids) > _most_tokens(live) or live.finish is not None:
            self._fail(
                name, Refusal(RefusalCode.INTERNAL, "the server sends more tokens than were asked for")
            )
            return
        if token_ids:
            self._live.came(live, len(token_ids), at)
            self._send_those_behind(live)
        live.num_output_tokens += len(token_ids)
        if self._believed is not None and token_ids:
            live.output_token_ids += token_ids
            self._is_computed(live)
        live.finish = delta.finish or live.finish
        if token_ids:
            self._ready.append(TokenDelta(live.request.key, token_ids, logprobs=delta.logprobs))

    def _end(self, ended: Ended) -> None:
        live = self._live.get(ended.name)
        if live is None:
            return
        refusal = ended.refusal
        if refusal is None and live.finish in (None, FinishReason.ERROR):
            refusal = Refusal(RefusalCode.INTERNAL, "the server's answer has no end")
        if refusal is not None:
            self._fail(ended.name, refusal)
        else:
            self._answered(ended.name, live)

    def _answered(self, name: str, live: _LiveSubmit) -> None:
        self._live.pop(name)
        self._send_those_behind(live)
        self._is_answered(live)
        self._ready.append(
            TokenDelta(live.request.key, finish_reason=live.finish, usage=self._usage_of(live))
        )

    def _fail(self, name: str, refusal: Refusal) -> None:
        """End a request in error, unless nothing lacks but the end of its answer."""
        live = self._live.get(name)
        assert live is not None
        self._server.abort(name)
        self._refusals.say(refusal, live.request.submit.request_id)
        if live.finish is None and live.num_output_tokens >= _most_tokens(live):
            live.finish = FinishReason.LENGTH
        if live.finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._answered(name, live)
            return
        self._live.pop(name)
        self._send_those_behind(live)
        self._ready.append(TokenDelta(live.request.key, finish_reason=FinishReason.ERROR, refusal=refusal))

    def _usage_of(self, live: _LiveSubmit) -> PromptUsage:
        submit, size, num_prompt_tokens = live.request.submit, self._card.block_size, live.num_prompt_tokens
        leases = without_tiers(submit.leases).answers
        if live.is_handed_over:
            num_there = self._num_told(live)
            return PromptUsage(
                num_prompt_tokens,
                None if num_there is None else min(num_there, num_prompt_tokens),
                num_written_tokens=0,
                leases=leases,
                num_split_tokens=num_prompt_tokens,
            )
        told = self._num_told(live)
        if told is not None or self._believed is not None:
            num_read = live.num_believed * size if told is None else told
            num_computed = max(LEAST_MEASURED_TOKENS, len(live.request.token_ids) - num_read)
            self._live.computed(num_computed, live.first_at - live.submitted_at)
        if told is None:
            self._warn_of(live.num_cached_tokens)
            return PromptUsage(num_prompt_tokens, None, 0, leases=leases, handover=live.handover)
        num_cached = min(told, num_prompt_tokens)
        num_reusable = (len(live.request.token_ids) - 1) // size
        num_expected = min(live.num_believed, num_reusable) * size if self._is_sparse else 0
        shares = NO_SHARES
        if num_cached and submit.user != NO_USER:
            found = hash_blocks(submit.root, live.request.token_ids[: num_cached // size * size], size)
            if self._believed is not None:
                found = found[: live.num_believed]  # who computed the others is not known
            residency = self._believed or self._residency
            shares = residency.shares(found, submit.user, num_prompt_tokens=num_prompt_tokens)
        return PromptUsage(
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=num_cached,
            num_written_tokens=max(0, num_prompt_tokens // size * size - num_cached),
            num_cross_user_tokens=min(shares.cross_user, num_cached),
            num_own_tokens=min(shares.own, num_cached - min(shares.cross_user, num_cached)),
            leases=leases,
            num_unresumable_tokens=max(0, num_expected - num_cached),
            handover=live.handover,
        )

    def _num_told(self, live: _LiveSubmit) -> int | None:
        """Return the server's count of cached tokens; None if it gives none, or one that cannot be."""
        said = live.num_cached_tokens
        return said if isinstance(said, int) and 0 <= said <= len(live.request.token_ids) else None

    def _warn_of(self, said: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            what = "does not say" if said is None else f"says {str(said)[:100]!r} when asked"
            advice = self._dialect.advice_on_cached
            logger.warning("the server %s how much of a prompt was cached: %s", what, advice)

    # What it says of itself.

    def _take_names(self, model: ServerModel) -> None:
        self._card = with_names(self._card, model)
        self._limits = replace(self._limits, adapters=frozenset(each.name for each in self._card.adapters))

    def _look(self, load: ServerLoad) -> None:
        if load.started_at != self._seen.started_at:
            raise EngineDied("the server was started anew")
        self._seen = load
        self._watched.seen()

    def _load(self) -> LoadSnapshot:
        """Other clients' requests are as the server last said."""
        num_others = max(0, self._seen.num_running + self._seen.num_waiting - len(self._live))
        num_other_waiting = min(num_others, self._seen.num_waiting)
        num_tokens = self._card.num_blocks * self._card.block_size
        return self._live.load(
            num_free_tokens=int((1.0 - self._seen.share_used) * num_tokens),
            num_cache_tokens=num_tokens,
            num_other_running=num_others - num_other_waiting,
            num_other_waiting=num_other_waiting,
            num_used_blocks=round(self._seen.share_used * self._card.num_blocks),
            num_cached_blocks=min((self._believed or self._residency).num_copies, self._card.num_blocks),
            is_predicted=self._believed is not None,
            num_total_blocks=self._card.num_blocks,
        )


def _most_tokens(live: _LiveSubmit) -> int:
    return live.request.sampling.max_tokens - live.request.submit.num_output_tokens


def _first_look(dialect: Dialect, server: Server) -> ServerLoad:
    try:
        return dialect.load([server.ask(path) for path in dialect.look_paths])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise StartupError(f"the server's load cannot be read: {error!r}") from error


def _stored_in(event: CacheEvent) -> tuple[BlockHash, ...]:
    return event.block_hashes if isinstance(event, BlockStored) else ()
