"""What benches share: who goes first, what a table says, what a counter sums up to."""

import asyncio
import random

import pytest
from prometheus_client import CollectorRegistry, Counter, start_http_server

from loadtests.benches.harness import (
    SharedPrefixes,
    System,
    closed_loop,
    counters,
    in_turns,
    open_loop,
)
from tests.loadtests.delay_server import MODEL, DelayServer, running

SYSTEMS = [System(name, 0, 0) for name in "abc"]


def test_every_system_goes_first_as_often_as_the_others() -> None:
    orders = [[system.name for system in in_turns(SYSTEMS, number)] for number in range(3)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


def test_runs_begin_cold_and_have_equal_structure() -> None:
    prompts = SharedPrefixes(MODEL, 3, prefix_tokens=50, num_users=2)
    one, other = (prompts.bodies(run, 20, random.Random(1)) for run in ("one", "other"))
    assert len({*one, *other}) == 40
    assert [body.rpartition(b"user")[2] for body in one] == [body.rpartition(b"user")[2] for body in other]


@pytest.mark.parametrize("is_open", [False, True])
def test_a_loop_has_an_answer_for_each_body_and_none_where_it_failed(is_open: bool) -> None:
    prompts = SharedPrefixes(MODEL, 2, prefix_tokens=20, num_users=2)
    bodies = prompts.bodies("run", 12, random.Random(1))
    refused = DelayServer(fate=lambda number, _body: "refused" if number % 4 == 0 else "whole")
    with running(refused) as server:
        system = System("it", int(server.url.rpartition(":")[2]), 1)
        if is_open:
            run = asyncio.run(open_loop(system, bodies, 200.0, random.Random(2)))
        else:
            run = asyncio.run(closed_loop(system, bodies, 3))
    assert (len(run.answers), len(run.good)) == (12, 9)
    assert run.hit_rate == 0


def test_a_counter_is_summed_over_processes_by_label() -> None:
    registries = [CollectorRegistry(), CollectorRegistry()]
    servers = []
    for number, registry in enumerate(registries, 1):
        tokens = Counter("tokens", "By tier", ["tier"], registry=registry)
        tokens.labels("host").inc(number)
        tokens.labels("disk").inc(10 * number)
        servers.append(start_http_server(0, "127.0.0.1", registry))
    urls = [f"http://127.0.0.1:{server.server_port}" for server, _ in servers]
    try:
        assert counters(urls, "tokens_total", "tier") == {"host": 3, "disk": 30}
        assert counters(urls, "tokens_total").total() == 33
    finally:
        for server, thread in servers:
            server.shutdown()
            server.server_close()
            thread.join()
