"""A Ray cluster that asks for no token, as its control service answers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from cluster.commands.ray_token import METHOD, refuse_open
from cluster.errors import ClusterError


@contextmanager
def control_service(*, token: str | None) -> Iterator[str]:
    """As Ray's does it: whoever asks shows the token in the metadata, or is turned away."""

    def answer(request: bytes, context: Any) -> bytes:
        if (
            token is not None
            and dict(context.invocation_metadata()).get("authorization") != f"Bearer {token}"
        ):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""

    service, _, name = METHOD.strip("/").partition("/")
    handler = grpc.unary_unary_rpc_method_handler(answer)
    with ThreadPoolExecutor() as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def test_a_ray_cluster_that_lets_everybody_in_is_refused() -> None:
    with control_service(token=None) as address, pytest.raises(ClusterError, match="asks for no token"):
        refuse_open(address)


def test_one_that_turns_strangers_away_is_not() -> None:
    with control_service(token="5e" * 32) as address:
        refuse_open(address)


def test_one_that_answers_nothing_is_no_refusal_of_strangers(free_port: int) -> None:
    with pytest.raises(ClusterError, match="--without-token"):
        refuse_open(f"127.0.0.1:{free_port}")
