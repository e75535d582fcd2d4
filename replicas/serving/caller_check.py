"""CallerCheck: serves a gRPC call only if its caller has proved its right.

Owns which role may make which call, and which tokens were used. `call_tokens.py` knows what a token proves.
Health is for all: probes have no secret. Everything else on the server, reflection too, is for routers and
the controller.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
from prometheus_client import Counter

from replicas.observation.metrics import CallRefusal
from replicas.protocol.call_tokens import METADATA_KEY, Audience, BadToken, Role, proof_of

EVERYBODY = "/grpc.health.v1.Health/"
ONLY: Mapping[str, frozenset[Role]] = {
    "Drain": frozenset({Role.CONTROLLER}),
    "Pull": frozenset({Role.REPLICA}),
    "TakeOver": frozenset({Role.REPLICA}),
}
"""Methods of our service that not every role may call."""

OTHERS = frozenset({Role.ROUTER, Role.CONTROLLER})
"""Roles for all other methods."""

MAX_KNOWN_NONCES = 65_536
"""Accepted tokens that are remembered, one per call. A router makes two or three per stream, so this covers a
long time."""

logger = logging.getLogger(__name__)


class CallerCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # it takes none at run time
    """`keys` are those that a token may be made with; without any, all that reach the port may call."""

    def __init__(
        self, service_name: str, audience: Audience, keys: Sequence[bytes], refused_calls: Counter
    ) -> None:
        self._service = f"/{service_name}/"
        self._audience = audience
        self._keys = tuple(keys)
        self._refused_calls = refused_calls
        self._known: dict[bytes, None] = {}
        self._logged: set[CallRefusal] = set()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        method: str = handler_call_details.method
        if self._keys and not method.startswith(EVERYBODY):
            metadata = dict(handler_call_details.invocation_metadata or ())
            refusal = self._refusal(method, metadata.get(METADATA_KEY))
            if refusal is not None:
                return _refuse(*refusal)
        return await continuation(handler_call_details)

    def _refusal(self, method: str, token: object) -> tuple[grpc.StatusCode, str] | None:
        unauthenticated = grpc.StatusCode.UNAUTHENTICATED
        if not isinstance(token, str):
            message = "this replica has a cluster secret, and the caller showed no token made of it"
            return self._count(CallRefusal.NO_TOKEN, unauthenticated, message)
        try:
            proof = proof_of(token, self._keys, self._audience, method)
        except BadToken as error:
            return self._count(CallRefusal.WRONG_TOKEN, unauthenticated, str(error))
        if proof.nonce in self._known:
            return self._count(CallRefusal.USED_TOKEN, unauthenticated, "the caller's token was shown before")
        self._remember(proof.nonce)
        if proof.role not in ONLY.get(method.removeprefix(self._service), OTHERS):
            message = f"a {proof.role.value} may not call {method}"
            return self._count(CallRefusal.WRONG_ROLE, grpc.StatusCode.PERMISSION_DENIED, message)
        return None

    def _remember(self, nonce: bytes) -> None:
        if len(self._known) >= MAX_KNOWN_NONCES:
            del self._known[next(iter(self._known))]
        self._known[nonce] = None

    def _count(self, reason: CallRefusal, code: grpc.StatusCode, message: str) -> tuple[grpc.StatusCode, str]:
        self._refused_calls.labels(reason.value).inc()
        if reason not in self._logged:  # a refused caller may come again, as often as it likes
            self._logged.add(reason)
            logger.warning(
                "refused a call; the next of this kind are not logged reason=%s: %s", reason.value, message
            )
        return code, message


def _refuse(code: grpc.StatusCode, message: str) -> Any:
    """Refuse a call of any kind, reading nothing of it."""

    async def refuse(messages: AsyncIterator[bytes], context: Any) -> None:
        await context.abort(code, message)

    return grpc.stream_stream_rpc_method_handler(refuse)
