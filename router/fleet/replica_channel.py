"""ReplicaChannel: the gRPC connection to one replica, and this router's credentials for calls.

Owns the channel's options and the nonces. Knows no message: `replica_client.py` makes the calls.
"""

import secrets

import grpc

from replicas.process.tls import ChannelTls, explained
from replicas.protocol.call_tokens import METADATA_KEY, NONCE_BYTES, Caller
from replicas.protocol.service import ReplicaStub, path

CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    # Describe carries tokenizer files; the largest in use are above 30 MB, and the default limit is 4 MB.
    ("grpc.max_receive_message_length", 128 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A dead host is noticed by the silence of its stream; pings serve the calls that have no frames, and
    # with them the kernel gives up on unacknowledged writes after the same time (TCP_USER_TIMEOUT).
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Whether and when to connect again is membership's decision: a new client must not inherit the
    # back-off of the one before it, and no call may be replayed behind our back.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Replicas are peers in one network; a proxy from the environment would only break the stream.
    ("grpc.enable_http_proxy", 0),
]


class ReplicaChannel:
    """`caller` makes the tokens; without one, this router has no secret and shows none."""

    def __init__(self, address: str, tls: ChannelTls | None, caller: Caller | None) -> None:
        self._tls = tls
        self._caller = caller
        self._channel = _channel(address, tls)
        self.stub = ReplicaStub(self._channel)

    def metadata(self, method: str) -> list[tuple[str, str]]:
        """For one call of that method: a token is good for one."""
        if self._caller is None:
            return []
        return [(METADATA_KEY, self._caller.token(path(method), secrets.token_bytes(NONCE_BYTES)))]

    def reason(self, error: grpc.RpcError) -> str:
        """Why a call has failed, for people."""
        assert isinstance(error, grpc.aio.AioRpcError)
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNAUTHENTICATED and self._caller is None:
            return "it serves only who has its cluster secret, and this router has none: set secret_file"
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return f"it does not believe this router: {details}"
        return explained(details, self._tls) or f"{code.name}: {details}"

    async def close(self) -> None:
        await self._channel.close(None)


def _channel(address: str, tls: ChannelTls | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, tls.credentials, options=[*CHANNEL_OPTIONS, *tls.options])
