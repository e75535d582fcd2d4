"""What the controller notes, sees of leases, looks at again and serves as metrics."""

import asyncio
import logging
import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Gauge

from cluster.config import FleetSpec, FoundServer, PoolSpec
from cluster.controller.bulletin import Bulletin
from cluster.controller.endpoint import MetricsEndpoint
from cluster.controller.leases import SILENT_SECONDS, LeaseBook, load_of
from cluster.controller.looks import repeat
from cluster.controller.metrics import FleetMetrics
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState
from tests.cluster.finding import finding
from tests.own_log import own_records


async def test_who_follows_reads_every_note_once_and_waits_for_the_next() -> None:
    bulletin = Bulletin()
    await bulletin.note("one")
    await bulletin.note("two")
    assert await bulletin.newer_than(-1) == ("one", "two")
    assert await bulletin.newer_than(1) == ("two",)
    waiting = asyncio.create_task(bulletin.newer_than(bulletin.version))
    await asyncio.sleep(0)
    assert not waiting.done()
    await bulletin.note("three")
    assert await waiting == ("three",)


async def test_what_is_waited_for_is_looked_at_after_every_note() -> None:
    bulletin = Bulletin()
    waiting = asyncio.create_task(bulletin.until(lambda: bulletin.version == 2))
    await bulletin.note("one")
    await asyncio.sleep(0)
    assert not waiting.done()
    await bulletin.note("two")
    await waiting


def test_a_complaint_stands_until_it_is_withdrawn_and_is_news_once() -> None:
    bulletin = Bulletin()
    assert bulletin.news("metrics", None) is None
    assert bulletin.news("metrics", "the port is taken") == "the port is taken"
    assert bulletin.news("metrics", "the port is taken") is None
    assert bulletin.complaints == {"metrics": "the port is taken"}
    assert bulletin.news("metrics", None) == "metrics: all is well again"
    assert bulletin.complaints == {}


A, B = ReplicaId("a-0"), ReplicaId("b-0")
READY = {A: Epoch("1"), B: Epoch("1")}


def record(
    replica_id: ReplicaId, state: ReplicaState = ReplicaState.READY, load: LoadSnapshot | None = None
) -> ReplicaRecord:
    return ReplicaRecord(replica_id, Epoch("1"), "x:1", state, "", 0, load or LoadSnapshot())


BOTH = {A: record(A), B: record(B)}
ONLY_B = {B: record(B)}


def looks(book: LeaseBook, *records: dict[ReplicaId, ReplicaRecord], every: float = 1.0) -> list[ReplicaId]:
    silent: list[ReplicaId] = []
    for number, seen in enumerate(records):
        silent = book.look(seen, READY, number * every)
    return silent


def test_a_replica_whose_lease_has_been_gone_for_long_is_silent() -> None:
    assert SILENT_SECONDS == 2.0
    assert looks(LeaseBook(), BOTH, ONLY_B) == []
    assert looks(LeaseBook(), BOTH, ONLY_B, ONLY_B) == [A]


def test_an_empty_registry_accuses_nobody() -> None:
    assert looks(LeaseBook(), BOTH, {}, {}, {}, {}) == []
    assert looks(LeaseBook(), BOTH, {}, {}, {}, ONLY_B) == [], "and the time without one does not count"


def test_time_in_which_nobody_looked_does_not_count() -> None:
    assert looks(LeaseBook(), BOTH, ONLY_B, every=60.0) == []


def test_another_epoch_under_the_name_is_no_sign_of_life_and_a_new_incarnation_starts_afresh() -> None:
    book = LeaseBook()
    looks(book, BOTH, ONLY_B)
    assert book.look(BOTH, {A: Epoch("2"), B: Epoch("1")}, 3.0) == []
    assert book.look(BOTH, {A: Epoch("2"), B: Epoch("1")}, 9.0) == []


def test_the_load_of_a_pool_is_that_of_its_ready_replicas() -> None:
    load = LoadSnapshot(num_running=3, num_waiting=2, num_pending_tokens=700)
    records = [
        record(ReplicaId("a-0"), load=load),
        record(ReplicaId("a-1"), load=load),
        record(ReplicaId("a-2"), ReplicaState.DRAINING, load),
        record(ReplicaId("a-b-0"), load=load),
    ]
    sample = load_of("a", records, 5.0)
    assert (sample.at, sample.num_in_flight, sample.num_pending_tokens) == (5.0, 10, 1400)


class Said:
    def __init__(self) -> None:
        self.complaints: list[str | None] = []

    async def __call__(self, what: str, complaint: str | None) -> None:
        assert what == "machines"
        self.complaints.append(complaint)


async def test_a_look_is_repeated_whatever_came_of_it(caplog: pytest.LogCaptureFixture) -> None:
    said, looks = Said(), 0

    async def look() -> str | None:
        nonlocal looks
        looks += 1
        if looks in (2, 3):
            raise KeyError("two\nlines")
        if looks == 4:
            raise RuntimeError
        if looks == 5:
            return "it is dark"
        if looks == 7:
            raise asyncio.CancelledError
        return None

    with pytest.raises(asyncio.CancelledError):
        await repeat("machines", look, 0, said)
    failed = "the look at machines failed: "
    assert said.complaints == [
        *(None, failed + r"'two\nlines'", failed + r"'two\nlines'", failed + "RuntimeError()"),
        *("it is dark", None),
    ]
    told = [record for record in own_records(caplog, logging.INFO) if record.exc_info]
    assert len(told) == 2, "the same is logged once"


SPEC = FleetSpec((PoolSpec(2, "small"), PoolSpec(1, "large-ones")))


def sample(metrics: FleetMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_pool_that_is_given_up_goes_down_to_zero_and_stays() -> None:
    metrics = FleetMetrics(CollectorRegistry())
    left = (ReplicaId("small-0"), ReplicaState.DRAINING)
    metrics.see(SPEC, [left])
    fewer = FleetSpec(SPEC.pools[1:])
    metrics.see(fewer, [left])
    assert sample(metrics, "fleet_replicas_desired", pool="small") == 0
    assert sample(metrics, "fleet_replicas", pool="small", state="draining") == 1
    metrics.see(fewer, [])
    assert sample(metrics, "fleet_replicas", pool="small", state="draining") == 0


def test_replicas_of_servers_that_were_found_count_for_the_pool_that_found_them() -> None:
    metrics = FleetMetrics(CollectorRegistry())
    spec = FleetSpec((finding("p"),))
    members = spec.with_servers({"p": [FoundServer("http://a:1"), FoundServer("http://b:1")]})
    metrics.see(members, [(ReplicaId("p_at_a-1-0"), ReplicaState.READY)])
    assert sample(metrics, "fleet_replicas_desired", pool="p") == 2
    assert sample(metrics, "fleet_replicas", pool="p", state="ready") == 1
    metrics.see(spec.with_servers({"p": []}), [])
    assert sample(metrics, "fleet_replicas_desired", pool="p") == 0
    assert {
        pool
        for sample in metrics.registry.collect()
        for each in sample.samples
        if (pool := each.labels.get("pool"))
    } == {"p"}


@pytest.fixture
def endpoint() -> MetricsEndpoint:
    registry = CollectorRegistry()
    Gauge("answer", "To everything", registry=registry).set(42)
    return MetricsEndpoint(registry)


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


async def test_a_port_that_is_taken_is_a_complaint_until_it_is_free(endpoint: MetricsEndpoint) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        await endpoint.serve("127.0.0.1", port)
        complaint = f"the controller serves no metrics on 127.0.0.1:{port}: Address already in use"
        assert (endpoint.address, endpoint.complaint) == (None, complaint)
    await endpoint.serve("127.0.0.1", port)
    assert (endpoint.address, endpoint.complaint) == (f"127.0.0.1:{port}", None)
    assert "answer 42.0" in await scraped(endpoint)
    await endpoint.close()
