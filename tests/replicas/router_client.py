"""The router's end of a Serve stream, as small as tests need it."""

from collections.abc import Sequence
from typing import Any

import grpc

from replicas.protocol.blocks import BlockHash, pack_token_ids
from replicas.protocol.frames import (
    Abort,
    ClientFrame,
    RequestKey,
    SamplingParams,
    ServerFrame,
    Submit,
    TokenDelta,
)
from replicas.protocol.service import ReplicaStub
from replicas.protocol.wire import decode_server_frame, encode

ROOT = BlockHash(bytes(16))


def submit(
    submit_id: int, token_ids: Sequence[int] = (1, 2, 3, 4, 5), *, max_tokens: int = 3, num_choices: int = 1
) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Submit(submit_id, pack_token_ids(token_ids), sampling, ROOT, num_choices=num_choices)


class RouterClient:
    def __init__(self, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]] | None = None) -> None:
        self.stub = ReplicaStub(channel)
        self.call: Any = self.stub.serve(metadata=metadata)

    async def send(self, *messages: Submit | Abort) -> None:
        frame = ClientFrame(
            submits=tuple(message for message in messages if isinstance(message, Submit)),
            aborts=tuple(message for message in messages if isinstance(message, Abort)),
        )
        await self.call.write(encode(frame))

    async def say_that_it_knows(self) -> None:
        """That the replica drains."""
        await self.call.write(encode(ClientFrame(knows_draining=True)))

    async def read(self) -> ServerFrame | None:
        message = await self.call.read()
        return None if message is grpc.aio.EOF else decode_server_frame(message)

    async def finish(self, *keys: tuple[int, int]) -> dict[RequestKey, list[TokenDelta]]:
        """Read until each of these choices has had its last delta; what comes for others is dropped."""
        found: dict[RequestKey, list[TokenDelta]] = {RequestKey(*key): [] for key in keys}
        open_keys = set(found)
        while open_keys:
            frame = await self.read()
            assert frame is not None, "the stream ended too soon"
            for delta in frame.deltas:
                if delta.key in found:
                    found[delta.key].append(delta)
                if delta.finish_reason is not None:
                    open_keys.discard(delta.key)
        return found
