"""PeerCalls: asks another replica to take chunks over, as a replica of the cluster.

Owns the call's credentials, and the name of each failure. A channel lives for one call: few are made, by a
process about to end.
"""

import asyncio
import secrets
from collections.abc import Callable

import grpc

from replicas.process.settings import SettingsError
from replicas.process.tls import ChannelTls, RouterTls
from replicas.protocol.call_tokens import METADATA_KEY, NONCE_BYTES, Audience, Caller, Role
from replicas.protocol.hand_overs import HandOverOutcome, TakeOver
from replicas.protocol.pulls import PullHint
from replicas.protocol.service import path
from replicas.protocol.wire import decode_taken_over, encode

_METHOD = path("TakeOver")

_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
]

_OUTCOMES = {
    grpc.StatusCode.DEADLINE_EXCEEDED: HandOverOutcome.LATE,
    grpc.StatusCode.UNAVAILABLE: HandOverOutcome.UNREACHABLE,
    grpc.StatusCode.CANCELLED: HandOverOutcome.UNREACHABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HandOverOutcome.BUSY,
}
"""All others are refusals."""


class CallFailed(Exception):
    """To our knowledge the peer has taken nothing."""

    def __init__(self, outcome: HandOverOutcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class PeerCalls:
    """`key` makes the tokens; without one, none are shown. `open_tls` reads files, beside the event loop."""

    def __init__(self, *, key: bytes | None, open_tls: Callable[[], RouterTls | None]) -> None:
        self._key = key
        self._open_tls = open_tls

    async def take_over(
        self, peer: PullHint, take_over: TakeOver, seconds: float
    ) -> tuple[HandOverOutcome, ...]:
        """Ask a peer to take chunks over; returns the outcome of each. Raises CallFailed within `seconds`."""
        async with await self._channel(peer.address) as channel:
            call = channel.unary_unary(_METHOD, encode, None)
            try:
                async with asyncio.timeout(seconds):
                    encoded = await call(take_over, timeout=seconds, metadata=self._metadata(peer))
                outcomes = decode_taken_over(encoded).outcomes
            except grpc.aio.AioRpcError as error:
                outcome = _OUTCOMES.get(error.code(), HandOverOutcome.REFUSED)
                raise CallFailed(outcome, f"{error.code().name}: {error.details()}") from error
            except TimeoutError:
                raise CallFailed(HandOverOutcome.LATE, "no answer in time") from None
            except ValueError as error:
                raise CallFailed(HandOverOutcome.REFUSED, str(error)) from error
        if len(outcomes) != len(take_over.chunks):
            raise CallFailed(HandOverOutcome.REFUSED, "it answers for other chunks than it was asked for")
        return outcomes

    async def _channel(self, address: str) -> grpc.aio.Channel:
        try:
            tls = await asyncio.to_thread(self._current_tls)
        except SettingsError as error:
            raise CallFailed(HandOverOutcome.UNREACHABLE, str(error)) from error
        if tls is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        return grpc.aio.secure_channel(address, tls.credentials, options=[*_OPTIONS, *tls.options])

    def _current_tls(self) -> ChannelTls | None:
        tls = self._open_tls()
        return None if tls is None else tls.current()

    def _metadata(self, peer: PullHint) -> tuple[tuple[str, str], ...]:
        if self._key is None:
            return ()
        caller = Caller(self._key, Role.REPLICA, Audience(peer.replica_id, peer.epoch))
        return ((METADATA_KEY, caller.token(_METHOD, secrets.token_bytes(NONCE_BYTES))),)
