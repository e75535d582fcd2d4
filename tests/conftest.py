"""Fixtures that every test folder uses."""

import functools
import inspect
import logging
import os
import signal
import ssl
from collections.abc import Iterator
from typing import Any

import httpx
import httpx2
import pytest
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings

from loadtests.stacks import local_stack
from tests.certificates import Authority
from tests.examples import examples
from tests.redis_server import RedisServer

pytest_plugins = ["tests.side_by_side"]

# Before anything loads torch, which reads it once: vLLM's kernels want the same number in every thread,
# and on a busy machine threads that wait for each other take a hundred times as long.
os.environ["OMP_NUM_THREADS"] = "1"

# Shells have what they start in the background ignore SIGINT, and so would processes that tests send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every client of httpx reads the certificates of the world's authorities for itself, which takes longer than
# most tests, and tests make thousands. They share what they read, unless they say whom they trust. The
# clients of OpenAI and Anthropic come with httpx2.


def _share_context(library: Any) -> None:
    new_context = library.create_ssl_context
    usual_context = functools.cache(new_context)

    def shared_context(
        verify: ssl.SSLContext | str | bool = True, cert: object = None, trust_env: bool = True
    ) -> ssl.SSLContext:
        make = usual_context if verify is True and cert is None else new_context
        context: ssl.SSLContext = make(verify=verify, cert=cert, trust_env=trust_env)
        return context

    library._transports.default.create_ssl_context = shared_context


_share_context(httpx)
_share_context(httpx2)

# An example may take as long as it takes: a machine that is busy for a moment is no finding.
settings.register_profile(
    "patient",
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """Where a test, or what it calls, sends the log of this process is over with the test."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.fixture(scope="module")
def compiling() -> Iterator[None]:
    """Our vLLM engine, where a test has built one in this process, has told torch to compile nothing."""
    import torch

    with torch._dynamo.config.patch(disable=False):
        yield


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
def redis_url(shared_redis: RedisServer) -> str:
    """A real, empty Redis. One process for the whole session, flushed for each test."""
    shared_redis.flush()
    return shared_redis.url


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis of the test's own, to kill and start again."""
    server = RedisServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
def free_port() -> int:
    return local_stack.free_port()


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def other_ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"))


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """A blocking call in our own code, made while an event loop runs in the thread, raises BlockingError."""
    if not inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        yield
        return
    with blockbuster_ctx(["replicas", "router", "cluster"]) as guard:
        for function in guard.functions.values():
            # The Redis client reads its own version from disk for each new connection. So be it.
            function.can_block_in("redis/utils.py", "get_lib_version")
            # gRPC joins its poller thread wherever its last object happens to be collected.
            function.can_block_in("threading.py", "join")
        yield
