"""ReplicaClient: one multiplexed Serve stream from this router process to one replica.

Owns the gRPC channel, the ids of the requests on it, and the delivery of deltas to their generations. One
client is one stream: when that breaks, everything in flight gets `ReplicaLost` and the client is finished.
`membership.py` decides about reconnecting, `router/dispatch/` about the requests.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import grpc
from msgspec.structs import replace

from replicas.process.cancellation import is_cancelled
from replicas.process.tls import ChannelTls
from replicas.protocol.call_tokens import Caller
from replicas.protocol.frames import Abort, LoadSnapshot, Submit
from replicas.protocol.status import Epoch, ModelCard, ReplicaId, TokenizerBundle
from replicas.protocol.wire import DescribeRequest, checked_delta, encode_client_frame, encode_submit
from router.fleet.image_uploads import ImageUploads
from router.fleet.inflight import Inflight, Mailbox, ReplicaLost
from router.fleet.replica_channel import ReplicaChannel
from router.fleet.replica_words import ReplicaWords, Traffic

MAX_FRAME_BYTES = 1 << 20
"""For submits in one ClientFrame: many long prompts in one turn become several frames."""

Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"

LoadListener = Callable[[ReplicaId, LoadSnapshot, int], None]
"""Hears each frame's load, and how many submits of this stream it counts."""


class Description(NamedTuple):
    card: ModelCard
    bundle: TokenizerBundle | None
    replica_id: ReplicaId
    epoch: Epoch


class ReplicaClient:
    """`serve()` carries the stream; `submit` and `abort` are synchronous and never wait."""

    def __init__(
        self,
        replica_id: ReplicaId,
        address: str,
        on_load: LoadListener,
        *,
        on_lost: Callable[["ReplicaClient"], None] | None = None,
        on_draining: Callable[[ReplicaId], None] = lambda _: None,
        stall_seconds: float = 10.0,
        traffic: Traffic | None = None,
        tls: ChannelTls | None = None,
        caller: Caller | None = None,
        epoch: Epoch | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.epoch = epoch
        self.address = address
        self.lost: ReplicaLost | None = None
        self.is_draining = False  # so it says
        self.num_frames = 0
        self.num_deltas = 0
        self.num_heard_submits = 0
        """How many of the requests that were submitted here the replica has acknowledged."""
        self._on_load = on_load
        self._on_lost = on_lost
        self._on_draining = on_draining
        self._owes_answer = False
        self._stall_seconds = stall_seconds
        self._traffic = Traffic() if traffic is None else traffic
        self._last_frame_time: float | None = None
        self._num_submits = 0
        self._inflight: dict[int, Inflight] = {}
        self._submits: deque[bytes] = deque()
        self._aborts: list[Abort] = []
        self._outbox_filled = asyncio.Event()
        self._words = ReplicaWords(replica_id, self._traffic)
        self._channel = ReplicaChannel(address, tls, caller)
        self.media = ImageUploads(self._channel, self._traffic.images)

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    def quiet_seconds(self) -> float | None:
        """Return the time since the last frame; None before the first."""
        if self._last_frame_time is None:
            return None
        return asyncio.get_running_loop().time() - self._last_frame_time

    def submit(self, submit: Submit, mailbox: Mailbox | None = None) -> Inflight:
        """Send a request with the next frame, under the stream's next id. Raises ReplicaLost if the stream is
        already broken.

        It is encoded at once: values that the protocol cannot carry raise (ValueError, OverflowError or
        TypeError) for this request alone, and not for the shared stream.
        """
        if self.lost is not None:
            raise self.lost
        submit_id = self._num_submits + 1
        encoded = encode_submit(replace(submit, submit_id=submit_id))
        self._num_submits = submit_id
        self._traffic.num_submits += 1
        inflight = Inflight(submit_id, submit.num_choices, mailbox if mailbox is not None else Mailbox())
        self._inflight[submit_id] = inflight
        self._submits.append(encoded)
        self._outbox_filled.set()
        return inflight

    def abort(self, submit_id: int, choice: int | None = None) -> None:
        """Stop a choice, or all of them; nothing more is delivered for it. Ended ones are ignored."""
        inflight = self._inflight.get(submit_id)
        if inflight is None:
            return
        if choice is None or inflight.close_choice(choice):
            del self._inflight[submit_id]
        self._traffic.num_aborts += 1
        self._aborts.append(Abort(submit_id, choice))
        self._outbox_filled.set()

    async def describe(self, *, include_tokenizer: bool, timeout_seconds: float = 10.0) -> Description:
        """Ask the listener for its identity and its model. Raises ReplicaLost without a valid answer in
        time."""
        try:
            encoded: bytes = await self._channel.stub.describe(
                DescribeRequest(include_tokenizer),
                metadata=self._channel.metadata("Describe"),
                timeout=timeout_seconds,
            )
        except grpc.RpcError as error:
            raise ReplicaLost(self._channel.reason(error)) from error
        try:
            described = self._words.description(encoded)
        except ValueError as error:
            raise ReplicaLost(f"its description breaks the contract: {error}") from error
        bundle = TokenizerBundle(described.tokenizer_files) if include_tokenizer else None
        return Description(described.card, bundle, described.replica_id, described.epoch)

    async def serve(self) -> None:
        """Carry the stream until it breaks; then everything in flight is lost, and `lost` says why."""
        if self.lost is not None:
            return
        call = self._channel.stub.serve(metadata=self._channel.metadata("Serve"))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(call))
                tasks.create_task(self._watch())
                await self._read(call)
        except* ReplicaLost:
            # Before Python 3.13 a group that is already ending swallows a cancellation.
            if is_cancelled():
                raise asyncio.CancelledError from None
        finally:
            self._break("the connection was closed")
            call.cancel()

    async def close(self) -> None:
        self._break("the connection was closed")
        await self._channel.close()

    async def _read(self, call: Call) -> None:
        """Read until the stream ends for any reason; always raises ReplicaLost."""
        time = asyncio.get_running_loop().time
        try:
            async for encoded in call:
                self.num_frames += 1
                self._traffic.num_frames += 1
                self._last_frame_time = time()
                self._receive(encoded)
        except grpc.RpcError as error:
            raise self._break(self._channel.reason(error)) from error
        except asyncio.CancelledError:
            # A channel that is closed under its call raises this too, though the task was not cancelled.
            if is_cancelled():
                raise
            raise self._break("the connection was closed") from None
        raise self._break("it closed the stream")

    def _receive(self, encoded: bytes) -> None:
        """Process a frame. A wrong load is skipped, and a wrong delta costs its own request. Raises
        ReplicaLost for an invalid frame, whose requests cannot be known."""
        try:
            message = self._words.frame(encoded)
        except ValueError as error:
            raise self._break(f"what it sends breaks the contract: {error}") from error
        self.num_heard_submits = max(self.num_heard_submits, message.num_counted_submits)
        if message.load is not None:
            self._on_load(self.replica_id, message.load, message.num_counted_submits)
        if message.is_draining and not self.is_draining:
            # What was submitted until now goes first; then the replica is told that nothing follows.
            self.is_draining = self._owes_answer = True
            self._on_draining(self.replica_id)
            self._outbox_filled.set()
        self.num_deltas += len(message.deltas)
        inflights = self._inflight
        for heard in message.deltas:
            submit_id, choice = heard.key
            inflight = inflights.get(submit_id)
            if inflight is None or choice not in inflight.open_choices:
                if not 0 < submit_id <= self._num_submits:
                    self._words.stranger(submit_id)
                continue  # aborted; this delta crossed the abort on its way
            try:
                delta = checked_delta(heard, self._words.vocab_size)
            except ValueError as error:
                self._words.refuse("delta", error)
                self.abort(submit_id)
                inflight.fail(ReplicaLost(f"an answer of it breaks the contract: {error}"))
                continue
            if delta.finish_reason is not None and inflight.close_choice(choice):
                del inflights[submit_id]
            inflight.deliver(delta)

    async def _write(self, call: Call) -> None:
        """Everything that was submitted and aborted in one turn of the event loop goes in one frame."""
        try:
            while True:
                await self._outbox_filled.wait()
                self._outbox_filled.clear()
                while self._submits or self._aborts or self._owes_answer:
                    await call.write(self._next_frame())
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the stream has ended; the read loop learns why

    def _next_frame(self) -> bytes:
        submits: list[bytes] = []
        room = MAX_FRAME_BYTES
        while self._submits and (not submits or len(self._submits[0]) <= room):
            submits.append(self._submits.popleft())
            room -= len(submits[-1])
        if self._submits:
            return encode_client_frame(submits)
        # Aborts go last: each may be for a submit of this very turn.
        aborts, self._aborts = self._aborts, []
        knows_draining, self._owes_answer = self._owes_answer, False
        return encode_client_frame(submits, aborts, knows_draining=knows_draining)

    async def _watch(self) -> None:
        """A replica sends a frame with every heartbeat, so silence means that the stream is dead.

        Counted in several short naps, so that a pause of this process itself is not held against it.
        """
        num_naps = 5
        while True:
            seen = self.num_frames
            for _ in range(num_naps):
                await asyncio.sleep(self._stall_seconds / num_naps)
                if self.num_frames != seen:
                    break
            else:
                raise self._break(f"nothing arrived for {self._stall_seconds:g} seconds")

    def _break(self, reason: str) -> ReplicaLost:
        """Tell everyone, once. Synchronous, so that no request is routed here in between."""
        if self.lost is None:
            self.lost = ReplicaLost(reason)
            if self._on_lost is not None:
                self._on_lost(self)
            for inflight in self._inflight.values():
                inflight.fail(self.lost)
            self._inflight.clear()
            self._submits.clear()
            self._aborts.clear()
        return self.lost
