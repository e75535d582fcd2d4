"""A replica that follows a script: the real gRPC service over real sockets, tokens made up.

The n-th output token of a choice is `token_at(seed of the choice, n)`, so a resumed generation must
read as if nothing had happened; a Submit whose resumed output does not match that is refused.
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import msgspec
from msgspec.structs import replace

from replicas.protocol.blocks import BlockHash, pack_token_ids
from replicas.protocol.frames import (
    FinishReason,
    LoadSnapshot,
    PromptUsage,
    Refusal,
    RefusalCode,
    RequestKey,
    SamplingParams,
    ServerError,
    ServerFrame,
    Submit,
    TokenDelta,
)
from replicas.protocol.images import media_hash
from replicas.protocol.media import ImageTaken
from replicas.protocol.service import handler
from replicas.protocol.status import Epoch, ModelCard, ReplicaId
from replicas.protocol.wire import (
    BlockList,
    DescribeResponse,
    Nothing,
    decode_client_frame,
    decode_describe_request,
    decode_media_part,
    encode,
)

ROOT = BlockHash(bytes(16))
CARD = ModelCard(
    name="toy",
    fingerprint="f" * 64,
    engine="scripted",
    block_size=16,
    num_blocks=1024,
    context_length=4096,
    vocab_size=50_000,
)


def asking(
    token_ids: Sequence[int],
    *,
    max_tokens: int,
    num_choices: int = 1,
    root: BlockHash = ROOT,
    **sampling: Any,
) -> Submit:
    """What a dispatcher hands to a client."""
    params = SamplingParams(max_tokens, ignore_eos=True, **sampling)
    return Submit(0, pack_token_ids(token_ids), params, root, num_choices=num_choices)


def token_at(seed: int, position: int) -> int:
    return (seed * 1_000_003 + position * 7_919 + 17) % 50_000


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what another task or process will bring about; half a minute at most."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@dataclass
class Script:
    """What a test may change while the replica runs."""

    step_seconds: float = 0.0
    heartbeat_seconds: float = 0.05
    holding: bool = False  # admitted requests make no progress
    silent: bool = False  # nothing is sent any more, not even heartbeats
    ignores_aborts: bool = False  # as if every delta crossed the abort on its way
    refusal: RefusalCode | None = None
    server_error: ServerError | None = None  # in whose words it refuses
    num_cached: int = 0  # tokens of each prompt, so it says
    die_after_tokens: int | None = None  # the stream breaks once that many tokens were sent
    deadly_token: int | None = None  # whoever sends it in a prompt that makes progress kills the replica
    dies_at_position: int | None = None  # so does whoever has got so many tokens in all
    load: LoadSnapshot = field(default_factory=LoadSnapshot)  # so it says, but for what runs
    holds_uploads: bool = False  # images that were sent whole are not answered for
    upload_error: grpc.StatusCode | None = None
    describes_as: tuple[str, str] | None = None  # replica id and epoch
    alter: Callable[[list[Any]], object] | None = None  # changes each frame, made plain, on its way


@dataclass
class _Choice:
    submit: Submit
    choice: int
    num_sent: int = 0

    @property
    def position(self) -> int:
        return self.submit.num_output_tokens + self.num_sent

    @property
    def seed(self) -> int:
        return (self.submit.sampling.seed + self.choice) % 2**64


@dataclass
class _Stream:
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    choices: dict[RequestKey, _Choice] = field(default_factory=dict)
    refusals: list[TokenDelta] = field(default_factory=list)
    num_submits: int = 0


class ScriptedReplica:
    def __init__(
        self,
        replica_id: str = "r0",
        epoch: str = "e0",
        card: ModelCard = CARD,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.replica_id = ReplicaId(replica_id)
        self.epoch = Epoch(epoch)
        self.card = card
        self.script = Script()
        self.files = {"tokenizer.json": b"{}"}
        self.submits: list[Submit] = []
        self.num_aborts = 0
        self.num_client_frames = 0
        self.num_tokens_sent = 0
        self.num_describes = 0
        self.media: dict[bytes, bytes] = {}  # what was uploaded, by its hash; a test may take some of it
        self.num_uploads = 0
        self._streams: list[_Stream] = []
        self._server: grpc.aio.Server | None = None
        self._credentials = credentials
        self.port = 0
        self.was_killed = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_live(self) -> int:
        """Choices that still run, as a real engine would count them: a dead stream's are gone."""
        return sum(len(stream.choices) for stream in self._streams)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    async def start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((handler(self),))
        if self._credentials is None:
            self.port = self._server.add_insecure_port(self.address)
        else:
            self.port = self._server.add_secure_port(self.address, self._credentials)
        await self._server.start()

    async def kill(self) -> None:
        """As abruptly as one process can: every stream is cut, the port refuses."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)
            self._streams.clear()

    async def describe(self, request: bytes, context: object) -> DescribeResponse:
        self.num_describes += 1
        replica_id, epoch = self.script.describes_as or (self.replica_id, self.epoch)
        files = self.files if decode_describe_request(request).include_tokenizer else {}
        return DescribeResponse(self.card, ReplicaId(replica_id), Epoch(epoch), files)

    async def list_blocks(self, request: bytes, context: object) -> AsyncIterator[BlockList]:
        yield BlockList(b"")

    async def pull(self, request: bytes, context: Any) -> None:
        """It has nothing to pull."""

    async def take_over(self, request: bytes, context: Any) -> None:
        """It takes nothing over: no replica asks it to."""
        raise NotImplementedError

    async def put_media(self, parts: AsyncIterator[bytes], context: Any) -> ImageTaken:
        read = [decode_media_part(encoded) async for encoded in parts]
        content = b"".join(part.content for part in read)
        assert len(content) == read[0].num_bytes
        self.num_uploads += 1
        while self.script.holds_uploads:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if self.script.upload_error is not None:
            await context.abort(self.script.upload_error, "no such picture")
        content_hash = media_hash(BlockHash(read[0].root), content)
        self.media[content_hash] = content
        return ImageTaken(content_hash)

    async def begin_drain(self, request: bytes, context: object) -> Nothing:
        raise NotImplementedError

    async def serve(self, frames: AsyncIterator[bytes], context: object) -> AsyncIterator[object]:
        stream = _Stream()
        self._streams.append(stream)
        reader = asyncio.create_task(self._read(frames, stream))
        try:
            while not self._is_dead():
                frame = self._step(stream)
                if not self.script.silent:
                    yield frame if self.script.alter is None else altered(frame, self.script.alter)
                if stream.choices and not self.script.holding and not self.script.silent:
                    await asyncio.sleep(self.script.step_seconds)
                else:
                    stream.changed.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self.script.heartbeat_seconds):
                            await stream.changed.wait()
        finally:
            reader.cancel()
            if stream in self._streams:
                self._streams.remove(stream)

    def _is_dead(self) -> bool:
        limit = self.script.die_after_tokens
        if self.was_killed:
            return True
        return limit is not None and self.num_tokens_sent >= limit

    async def _read(self, frames: AsyncIterator[bytes], stream: _Stream) -> None:
        async for encoded in frames:
            frame = decode_client_frame(encoded)
            self.num_client_frames += 1
            for submit in frame.submits:
                self.submits.append(submit)
                self._admit(submit, stream)
                stream.num_submits += 1
            for abort in frame.aborts:
                self.num_aborts += 1
                for key in [] if self.script.ignores_aborts else list(stream.choices):
                    if key.number == abort.submit_id and abort.choice in (None, key.choice):
                        del stream.choices[key]
            stream.changed.set()

    def _admit(self, submit: Submit, stream: _Stream) -> None:
        code = self.script.refusal
        resumed = submit.token_ids()[submit.num_tokens - submit.num_output_tokens :]
        seed, size = submit.sampling.seed, self.card.vocab_size
        if list(resumed) != [token_at(seed, n) % size for n in range(submit.num_output_tokens)]:
            code = RefusalCode.INVALID_REQUEST
        if any(span.content_hash not in self.media for span in submit.media):
            code = RefusalCode.MEDIA_MISSING
        for choice in range(submit.num_choices):
            key = RequestKey(submit.submit_id, choice)
            if code is not None:
                refusal = Refusal(code, f"refused: {code.value}", self.script.server_error)
                stream.refusals.append(TokenDelta(key, finish_reason=FinishReason.ERROR, refusal=refusal))
            else:
                stream.choices[key] = _Choice(submit, choice)

    def _kills(self, choice: _Choice) -> bool:
        script = self.script
        if script.deadly_token is not None and script.deadly_token in choice.submit.token_ids():
            return True
        return script.dies_at_position is not None and choice.position >= script.dies_at_position

    def _step(self, stream: _Stream) -> ServerFrame:
        deltas, stream.refusals = stream.refusals, []
        for key, choice in list(stream.choices.items()):
            if self.script.holding or self.script.silent or self._is_dead():
                break
            if self._kills(choice):
                self.was_killed = True
                break
            token_id = token_at(choice.seed, choice.position) % self.card.vocab_size
            usage = (
                PromptUsage(choice.submit.num_tokens, self.script.num_cached, 0)
                if choice.num_sent == 0
                else None
            )
            choice.num_sent += 1
            self.num_tokens_sent += 1
            finished = choice.position >= choice.submit.sampling.max_tokens
            if finished:
                del stream.choices[key]
            deltas.append(TokenDelta(key, (token_id,), FinishReason.LENGTH if finished else None, usage))
        load = replace(self.script.load, num_running=len(stream.choices))
        return ServerFrame(tuple(deltas), load, stream.num_submits)


def altered(frame: ServerFrame, alter: Callable[[list[Any]], object]) -> list[Any]:
    plain: list[Any] = msgspec.msgpack.decode(encode(frame))
    alter(plain)
    return plain


async def _main(port: int) -> None:
    replica = ScriptedReplica()
    replica.port = port
    await replica.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(_main(parser.parse_args().port))
