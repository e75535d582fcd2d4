"""The controller's /metrics: on the port that the file names, and no reason to die where that is taken."""

import asyncio
import socket
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from cluster.controller.endpoint import MetricsEndpoint


@pytest.fixture
def endpoint() -> MetricsEndpoint:
    registry = CollectorRegistry()
    Gauge("answer", "To everything", registry=registry).set(42)
    return MetricsEndpoint(registry)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


async def scraped(endpoint: MetricsEndpoint) -> str:
    def read() -> str:
        with urllib.request.urlopen(f"http://{endpoint.address}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(read)


async def test_it_serves_where_it_was_asked_to_and_moves_when_asked_again(
    endpoint: MetricsEndpoint, free_port: int
) -> None:
    await endpoint.serve("127.0.0.1", 0)
    first = endpoint.address
    assert "answer 42.0" in await scraped(endpoint)
    await endpoint.serve("127.0.0.1", 0)
    assert endpoint.address == first, "the same place is no move"
    await endpoint.serve("127.0.0.1", free_port)
    assert endpoint.address == f"127.0.0.1:{free_port}"
    assert "answer 42.0" in await scraped(endpoint)
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(urllib.request.urlopen, f"http://{first}/metrics", timeout=30)
    await endpoint.serve("127.0.0.1", None)
    assert (endpoint.address, endpoint.complaint) == (None, None)
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(socket.create_connection, ("127.0.0.1", free_port), 30)
    await endpoint.close()


async def test_a_port_that_is_taken_is_a_complaint_until_it_is_free(
    endpoint: MetricsEndpoint, taken_port: int
) -> None:
    await endpoint.serve("127.0.0.1", taken_port)
    assert endpoint.address is None
    assert endpoint.complaint == (
        f"the controller serves no metrics on 127.0.0.1:{taken_port}: Address already in use"
    )
    await endpoint.serve("127.0.0.1", 0)
    assert endpoint.complaint is None
    assert "answer 42.0" in await scraped(endpoint)
    await endpoint.close()


async def test_a_port_that_became_free_is_taken_when_it_is_tried_again(
    endpoint: MetricsEndpoint,
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        await endpoint.serve("127.0.0.1", port)
        assert endpoint.complaint is not None
    await endpoint.serve("127.0.0.1", port)
    assert (endpoint.address, endpoint.complaint) == (f"127.0.0.1:{port}", None)
    await endpoint.close()


async def test_an_address_that_this_machine_does_not_have_is_a_complaint_too(
    endpoint: MetricsEndpoint,
) -> None:
    await endpoint.serve("203.0.113.7", 9400)
    assert endpoint.complaint is not None
    assert "203.0.113.7:9400" in endpoint.complaint
