"""ReplicaServer: a replica's gRPC server: Serve streams, Describe, ListBlocks, PutMedia, Drain, health.

Owns the streams, and the mapping of each router's submit ids to the replica's serials.

A request lives here from its Submit until every choice has had its last delta, was aborted, or its stream
ended. The end of a stream aborts all its open requests. A request's blocks are announced from its admission
until its first delta (they are stored by then) or its end.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from replicas.kvstore.pulling.chunk_reader import ChunkReader
from replicas.loop import ENGINE_FAILED
from replicas.observation.metrics import ReplicaMetrics
from replicas.observation.trace_points import Tracing
from replicas.protocol.blocks import BlockHash
from replicas.protocol.call_tokens import Audience
from replicas.protocol.frames import (
    Abort,
    FinishReason,
    LoadSnapshot,
    Refusal,
    RefusalCode,
    RequestKey,
    StepFrame,
    Submit,
    TokenDelta,
)
from replicas.protocol.hand_overs import TakenOver
from replicas.protocol.media import ImageTaken
from replicas.protocol.service import handler
from replicas.protocol.status import Epoch, ModelCard, ReplicaId, TokenizerBundle
from replicas.protocol.ways import num_image_tokens_left
from replicas.protocol.wire import (
    SERVICE_NAME,
    BlockList,
    DescribeResponse,
    Nothing,
    decode_client_frame,
    decode_describe_request,
)
from replicas.serving.arrivals import Arrivals
from replicas.serving.caller_check import CallerCheck
from replicas.serving.image_service import ImageInbox, ImageService
from replicas.serving.intake import Intake
from replicas.serving.open_splits import OpenSplits
from replicas.serving.ports import Ports
from replicas.serving.pull_service import PullService
from replicas.serving.router_stream import OpenRequest, RouterStream
from replicas.serving.store_questions import StoreInbox, StoreQuestions
from replicas.serving.take_over_service import TakeOverService
from replicas.serving.waits import Waits

logger = logging.getLogger(__name__)

MAX_CHOICES = 128
"""The most continuations of one prompt; each costs a batch slot, and the wire would allow four billion."""

HASHES_PER_BLOCK_LIST = 65_536


class EngineInbox(StoreInbox, ImageInbox, Protocol):
    """The part of the engine loop that the server uses."""

    def submit(self, serial: int, submit: Submit) -> bool: ...

    def abort(self, key: RequestKey) -> None: ...


class Announcer(Protocol):
    """The part of the index writer that the server uses."""

    def announce(
        self, announcement_id: int, block_hashes: tuple[BlockHash, ...], points: tuple[BlockHash, ...]
    ) -> bool: ...

    def end(self, announcement_id: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Identity:
    """The answer of Describe. `read_card` has the card as it is now."""

    replica_id: ReplicaId
    epoch: Epoch
    read_card: Callable[[], ModelCard]
    bundle: TokenizerBundle


@dataclass(frozen=True, slots=True)
class _StreamEnd:
    """Why a stream was ended from this side; None as status is a regular end."""

    status: grpc.StatusCode | None = None
    message: str = ""


class ReplicaServer:
    """`deliver` takes frames on the event loop; everything else is gRPC's business."""

    def __init__(
        self,
        identity: Identity,
        inbox: EngineInbox,
        announcer: Announcer,
        *,
        list_blocks: Callable[[], Iterable[BlockHash]],
        on_drain: Callable[[], None],
        metrics: ReplicaMetrics,
        heartbeat_seconds: float,
        intake: Intake,
        call_keys: Sequence[bytes] = (),
        kv: ChunkReader | None = None,
        tracing: Tracing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._inbox = inbox
        self._announcer = announcer
        self._list_blocks = list_blocks
        self._on_drain = on_drain
        self._metrics = metrics
        self._waits = Waits(metrics, clock)
        self._heartbeat_seconds = heartbeat_seconds
        self._intake = intake
        self._tracing = tracing or Tracing()
        self._clock = clock
        self._serials = itertools.count(1)
        self._num_frames = 0
        self._open: dict[int, OpenRequest] = {}
        self._streams: list[RouterStream] = []
        card = identity.read_card()
        self._arrivals = Arrivals(LoadSnapshot(num_total_blocks=card.num_blocks))
        metrics.arrived.set_function(lambda: self._arrivals.num_requests)
        metrics.open_sequences.set_function(lambda: intake.num_sequences)
        metrics.open_tokens.set_function(lambda: intake.num_tokens)
        self._splits = OpenSplits(
            num_steps=lambda: self._num_frames, is_idle=lambda: not self._open, clock=clock
        )
        self._pull_service = PullService(kv, identity.epoch, metrics.pulled_chunks, self._splits)
        metrics.open_splits.set_function(lambda: self._splits.num_open)
        metrics.waiting_pulls.set_function(lambda: self._pull_service.num_waiting)
        self.store = StoreQuestions(inbox)
        layout = None if kv is None else kv.layout
        self._take_over_service = TakeOverService(layout, self.store, metrics.leaving.taken_over_chunks)
        self._image_service = ImageService(inbox, metrics.media, takes_images=bool(card.image_rule))
        self._is_telling = False
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._ports = Ports(SERVICE_NAME)
        audience = Audience(identity.replica_id, identity.epoch)
        self._caller_check = CallerCheck(SERVICE_NAME, audience, call_keys, metrics.refused_calls)

    @property
    def load(self) -> LoadSnapshot:
        """The engine's newest load, plus later arrivals."""
        return self._arrivals.load

    @property
    def num_requests(self) -> int:
        return len(self._open)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    async def start(
        self,
        host: str,
        port: int,
        credentials: grpc.ServerCredentials | None = None,
        *,
        health_socket: str | None = None,
    ) -> int:
        """Listen, not yet healthy. Returns the port; raises OSError if it cannot be had."""
        server = self._ports.new_server(self._caller_check)
        server.add_generic_rpc_handlers((handler(self),))
        return await self._ports.open(server, host, port, credentials, health_socket)

    async def set_serving(self, is_serving: bool) -> None:
        """Set grpc.health's answer for the server and for the service."""
        await self._ports.set_serving(is_serving)

    async def tell_draining(self) -> None:
        """Return once every router knows of the drain. Submits before that are accepted."""
        self._is_telling = self._take_over_service.is_draining = True
        for stream in self._streams:
            stream.tell_draining()
        while unaware := [stream for stream in self._streams if not stream.knows_draining.is_set()]:
            await unaware[0].knows_draining.wait()

    def drain(self) -> None:
        """Refuse all further submits."""
        self._is_draining = True

    @property
    def is_idle(self) -> bool:
        """No request is open and no peer reads from here."""
        return self._idle.is_set() and self._pull_service.is_idle

    async def wait_idle(self) -> None:
        """Return once no request is open and no peer reads from here."""
        await self._idle.wait()
        await self._pull_service.wait_idle()

    async def stop(self, grace_seconds: float) -> None:
        """Send what is queued, end every stream, close. Running requests are aborted."""
        for stream in self._streams:
            stream.close()
        await self._ports.close(grace_seconds)
        await asyncio.to_thread(self._pull_service.close)

    def deliver(self, frame: StepFrame, step_seconds: float = 0.0) -> None:
        """Give each stream its share of one frame, and the load to all. Its events have been observed."""
        self._arrivals.take(frame.load, frame.last_serial)
        self._num_frames += 1
        for serial, _ in frame.started:
            if (begun := self._open.get(serial)) is not None:
                begun.trace.started(self._num_frames, step_seconds)
        self._waits.take(frame, step_seconds)
        self.store.take(frame.answers)
        self._image_service.take(frame.media)
        for delta in frame.deltas:
            serial, choice = delta.key
            request = self._open.get(serial)
            if request is None or choice not in request.choices:
                continue  # aborted while this was on its way
            self._end_announcement(request)
            request.trace.delta(delta, self._num_frames)
            request.stream.put(
                TokenDelta(
                    RequestKey(request.submit_id, choice),
                    delta.token_ids,
                    delta.finish_reason,
                    delta.usage,
                    delta.logprobs,
                    delta.refusal,
                    delta.body,
                    delta.num_counted,
                )
            )
            if delta.finish_reason is not None:
                self._end_choice(serial, request, choice)
        self._offer_load()

    async def serve(self, frames: AsyncIterator[bytes], context: Any) -> None:
        stream = RouterStream(self.load, self._clock)
        stream.wanted.set()  # a router that has just come wants to know the load
        stream.is_draining = self._is_telling
        self._streams.append(stream)
        self._metrics.streams.set(len(self._streams))
        try:
            end = await self._serve(stream, frames, context)
        finally:
            self._abort_all(stream)
            stream.cut()
            self._streams.remove(stream)
            self._metrics.streams.set(len(self._streams))
        if end.status is not None:
            logger.warning("ended a router's stream status=%s reason=%s", end.status.name, end.message)
            await context.abort(end.status, end.message)

    async def describe(self, request: bytes, context: Any) -> DescribeResponse:
        try:
            question = decode_describe_request(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        identity = self._identity
        files = identity.bundle.files if question.include_tokenizer else {}
        return DescribeResponse(identity.read_card(), identity.replica_id, identity.epoch, files)

    async def list_blocks(self, request: bytes, context: Any) -> AsyncIterator[BlockList]:
        hashes = list(self._list_blocks())
        for at in range(0, len(hashes), HASHES_PER_BLOCK_LIST):
            yield BlockList(b"".join(hashes[at : at + HASHES_PER_BLOCK_LIST]))

    async def pull(self, request: bytes, context: Any) -> None:
        await self._pull_service.serve(request, context)

    async def take_over(self, request: bytes, context: Any) -> TakenOver:
        return await self._take_over_service.serve(request, context)

    async def put_media(self, parts: AsyncIterator[bytes], context: Any) -> ImageTaken:
        return await self._image_service.serve(parts, context)

    async def begin_drain(self, request: bytes, context: Any) -> Nothing:
        self._on_drain()
        return Nothing()

    async def _serve(self, stream: RouterStream, frames: AsyncIterator[bytes], context: Any) -> _StreamEnd:
        """Read, write and watch the bound until the first of the three is over.

        A write in flight is never cancelled: gRPC could send no status after it. To a router that does
        not read it may take for ever, so the requests are freed before it is waited for.
        """
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(self._read(stream, frames))
            watcher = group.create_task(self._watch_outbox(stream))
            writer = group.create_task(self._write(stream, context))
            done, _ = await asyncio.wait((reader, watcher, writer), return_when=asyncio.FIRST_COMPLETED)
            reader.cancel()
            watcher.cancel()
            self._abort_all(stream)
            stream.cut()
        return next((task.result() for task in (reader, watcher) if task in done), _StreamEnd())

    async def _read(self, stream: RouterStream, frames: AsyncIterator[bytes]) -> _StreamEnd:
        async for encoded in frames:
            try:
                frame = decode_client_frame(encoded)
            except ValueError as error:
                return _StreamEnd(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            self._metrics.submits.inc(len(frame.submits))
            for submit in frame.submits:
                self._submit(stream, submit)
            for abort in frame.aborts:
                self._abort(stream, abort)
            if frame.knows_draining:
                stream.knows_draining.set()
        return _StreamEnd()

    async def _write(self, stream: RouterStream, context: Any) -> None:
        """Write one message per wake-up, and one per heartbeat when idle."""
        while not stream.is_over:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_seconds):
                    await stream.wanted.wait()
            if stream.is_cut:
                return
            try:
                await context.write(stream.take())
                self._metrics.frames.inc()
            except grpc.aio.BaseError:
                return  # the router has gone; gRPC cancels the whole call in a moment

    async def _watch_outbox(self, stream: RouterStream) -> _StreamEnd:
        await stream.overflowed.wait()
        return _StreamEnd(grpc.StatusCode.RESOURCE_EXHAUSTED, "the router does not read its stream")

    def _submit(self, stream: RouterStream, submit: Submit) -> None:
        refusal = self._refusal(stream, submit)
        if refusal is not None:
            self._refuse(stream, submit, refusal)
            return
        serial = next(self._serials)
        if not self._inbox.submit(serial, submit):
            self._refuse(stream, submit, Refusal(RefusalCode.ENGINE_FAILED, ENGINE_FAILED))
            return
        stream.submitted()
        num_tokens = submit.num_expected_tokens or submit.num_tokens
        self._waits.begin(serial)
        self._intake.take(serial, submit)
        self._arrivals.add(
            serial,
            num_requests=submit.num_choices,
            num_tokens=num_tokens,
            num_room_tokens=submit.num_tokens,
            num_image_tokens=num_image_tokens_left(submit.media, submit.num_tokens - num_tokens),
        )
        choices = set(range(submit.num_choices))
        trace = self._tracing.taken(submit, self._num_frames)
        request = self._open[serial] = OpenRequest(
            stream, submit.submit_id, choices, trace=trace, split_id=submit.split_id
        )
        if submit.split_id:
            self._splits.begin(submit.split_id)
        logger.debug("a request was taken request_id=%s serial=%d", submit.request_id, serial)
        stream.serials[submit.submit_id] = serial
        self._idle.clear()
        self._announce(request, submit)
        self._offer_load()

    def _refusal(self, stream: RouterStream, submit: Submit) -> Refusal | None:
        if submit.submit_id in stream.serials:
            # Their deltas could not be told apart, so the one that runs ends with the one that came.
            self._abort(stream, Abort(submit.submit_id))
            return Refusal(RefusalCode.INVALID_REQUEST, f"submit id {submit.submit_id} is in use")
        if self._is_draining or stream.knows_draining.is_set():
            return Refusal(RefusalCode.DRAINING, "this replica is draining")
        if submit.num_choices > MAX_CHOICES:
            return Refusal(RefusalCode.INVALID_REQUEST, f"a request has at most {MAX_CHOICES} choices")
        if not self._intake.has_room(submit):
            # The engine counts too, but only between steps: its inbox must not grow meanwhile.
            return Refusal(
                RefusalCode.OVERLOADED, "this replica has reached its limit of sequences and tokens"
            )
        return None

    def _refuse(self, stream: RouterStream, submit: Submit, refusal: Refusal) -> None:
        self._metrics.refusals.labels(refusal.code.value).inc()
        self._tracing.refused(submit, refusal.code.value)
        logger.debug("a request was refused request_id=%s code=%s", submit.request_id, refusal.code.value)
        if submit.split_id:
            self._splits.refused(submit.split_id)
        stream.submitted()
        for choice in range(min(submit.num_choices, MAX_CHOICES)):
            key = RequestKey(submit.submit_id, choice)
            stream.put(TokenDelta(key, finish_reason=FinishReason.ERROR, refusal=refusal))
        stream.offer_load(self.load)

    def _abort(self, stream: RouterStream, abort: Abort) -> None:
        serial = stream.serials.get(abort.submit_id)
        if serial is None:
            return  # it has ended meanwhile
        self._metrics.aborts.inc()
        request = self._open[serial]
        choices = request.choices if abort.choice is None else request.choices & {abort.choice}
        for choice in list(choices):
            self._inbox.abort(RequestKey(serial, choice))
            self._end_choice(serial, request, choice)

    def _abort_all(self, stream: RouterStream) -> None:
        for submit_id in list(stream.serials):
            self._abort(stream, Abort(submit_id))

    def _offer_load(self) -> None:
        for stream in self._streams:
            stream.offer_load(self.load)

    def _announce(self, request: OpenRequest, submit: Submit) -> None:
        announcement_id, hashes, points = (
            submit.announcement_id,
            submit.announced_hashes,
            submit.announced_points,
        )
        if not (announcement_id and (hashes or points)):
            return
        if self._announcer.announce(announcement_id, hashes, points):
            request.announcement_id = announcement_id

    def _end_announcement(self, request: OpenRequest) -> None:
        if request.announcement_id is not None:
            self._announcer.end(request.announcement_id)
            request.announcement_id = None

    def _end_choice(self, serial: int, request: OpenRequest, choice: int) -> None:
        request.choices.discard(choice)
        self._intake.end_sequence(serial)
        if not request.choices:
            self._end_announcement(request)
            request.trace.end(self._num_frames)
            self._waits.end(serial)
            self._arrivals.remove(serial)
            if request.split_id:
                self._splits.end(request.split_id)
            del self._open[serial]
            del request.stream.serials[request.submit_id]
            if not self._open:
                self._idle.set()
