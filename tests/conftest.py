"""Fixtures that every test folder uses."""

import functools
import inspect
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings

from loadtests.stacks import local_stack
from tests.certificates import Authority
from tests.examples import examples
from tests.redis_server import RedisServer

# Before anything loads torch, which reads it once: vLLM's kernels want the same number in every thread,
# and on a busy machine threads that wait for each other take a hundred times as long.
os.environ["OMP_NUM_THREADS"] = "1"

# Every client of httpx reads the certificates of the world's authorities for itself, which takes longer than
# most tests, and tests make thousands. They share what they read, unless they say whom they trust.
_new_context = httpx.create_ssl_context
_usual_context = functools.cache(_new_context)


def _shared_context(
    verify: ssl.SSLContext | str | bool = True, cert: object = None, trust_env: bool = True
) -> ssl.SSLContext:
    make = _usual_context if verify is True and cert is None else _new_context
    return make(verify=verify, cert=cert, trust_env=trust_env)


httpx._transports.default.create_ssl_context = _shared_context

# An example may take as long as it takes: a machine that is busy for a moment is no finding.
settings.register_profile(
    "patient",
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--alone", action="store_true", help="only the tests that need the machine to themselves"
    )


def pytest_configure(config: pytest.Config) -> None:
    # The order below holds side by side, too, instead of that by the number of a group's tests.
    config.option.loadscopereorder = False


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of those that run alone there are few, and whatever lies in other files need not be loaded."""
    if not config.getoption("--alone") or collection_path.suffix != ".py":
        return None
    return "mark.alone" not in collection_path.read_text() or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Side by side, one worker runs all of a group. What takes longest comes first, so that no worker is left
    with it at the end."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if not is_worker and not config.getoption("--alone"):
        return
    left_out = [item for item in items if _is(item, "alone") == is_worker]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if _is(item, "alone") != is_worker]
    turns: dict[str, int] = {}
    for item in items:
        turns[_group(item)] = min(_turn(item), turns.get(_group(item), _turn(item)))
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=lambda item: turns[_group(item)])


def _group(item: pytest.Item) -> str:
    """Tests of a file share what is built for their module. vLLM takes memory, images take minutes."""
    return next((mark for mark in ("vllm", "images") if _is(item, mark)), str(item.path))


def _turn(item: pytest.Item) -> int:
    marks = ("images", "vllm", "slow", "cluster")
    return next((turn for turn, mark in enumerate(marks) if _is(item, mark)), len(marks))


def _is(item: pytest.Item, mark: str) -> bool:
    return item.get_closest_marker(mark) is not None  # a keyword may be the name of a folder, too


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
