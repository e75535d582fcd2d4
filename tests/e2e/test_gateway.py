"""A real Envoy whose endpoint picker is a router, in front of two servers: what clients get, what breaks."""

import json
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtests.stacks.local_stack import LocalStack, free_port, local_stack
from replicas.toy_model import checkpoint_directory
from tests.cluster.kvasir_command import wait_until
from tests.e2e.conversing_server import NUM_WORDS, ConversingServer
from tests.envoy_server import Envoy, running_envoy

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "served"
NOWHERE = "127.0.0.1:9"
LONG = "one river, two stones, three lamps and seven gardens " * 12
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_CACHED = re.compile(rb'"(cached_tokens|input_tokens|cache_read_input_tokens)": ?\d+')


@dataclass
class Gateway:
    envoy: Envoy
    picker_port: int
    stack: LocalStack
    servers: list[ConversingServer]
    http: httpx.Client

    def metric(self, name: str, *labels: str) -> float:
        text = self.http.get(f"{self.stack.url}/metrics").text
        lines = [line for line in text.splitlines() if re.match(rf"{name}(\{{|\s)", line)]
        assert lines, f"there is no metric {name}"
        return sum(float(line.split()[-1]) for line in lines if all(label in line for label in labels))

    def until_idle(self) -> None:
        names = ("router_reservations", "router_in_flight", "router_picker_streams")
        wait_until(lambda: not any(map(self.metric, names)), lambda: str([*map(self.metric, names)]), 20)

    def post(
        self, body: dict[str, Any], path: str = "/v1/completions", url: str | None = None
    ) -> httpx.Response:
        return self.http.post(f"{url or self.envoy.url}{path}", json=body)

    def asked(self) -> list[int]:
        """How many requests of clients each server has had."""
        return [sum("session_id" not in body for body in server.bodies) for server in self.servers]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    servers = [ConversingServer(), ConversingServer()]
    picker_port = free_port()
    first, second = (server.endpoint for server in servers)
    envoy = Envoy(picker_port, [[first], [second], [NOWHERE]])
    replicas = [
        {
            "engine": "remote",
            "engine_url": server.url,
            "engine_endpoint": server.endpoint,
            "model": checkpoint_directory(None),
            "index_stride": 16,
        }
        for server in servers
    ]
    router = {"picker_port": picker_port, "index_stride": 16, "max_in_flight": 64, "pass_fields": "x_note"}
    with (
        envoy.running(tmp_path_factory.mktemp("envoy")),
        local_stack(num_replicas=2, replica_settings=replicas, router_settings=router) as stack,
        httpx.Client(timeout=60, trust_env=False) as http,
    ):
        yield Gateway(envoy, picker_port, stack, servers, http)
    for server in servers:
        server.close()


def body_of(path: str, text: str, **fields: Any) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"model": MODEL, "prompt": text, "max_tokens": 5, **fields}
    if path == "/v1/responses":
        return {"model": MODEL, "input": text, "max_output_tokens": 16, **fields}
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 5, **fields}


def said(answer: httpx.Response) -> tuple[int, str, bytes]:
    """All but how much was cached, which differs by design."""
    assert answer.status_code == 200, answer.text
    return answer.status_code, answer.headers["content-type"], _CACHED.sub(b"", answer.content)


@pytest.mark.parametrize("mode", ["streamed", "buffered"])
def test_answers_are_those_of_the_servers(gateway: Gateway, mode: str) -> None:
    rng = random.Random(mode)
    texts = [
        " ".join(rng.choices("river stone lamp garden wind".split(), k=rng.randrange(5, 90)))
        for _ in range(50)
    ]
    url = gateway.envoy.url if mode == "streamed" else gateway.envoy.buffered_url

    def compare(number: int) -> None:
        path = PATHS[number % len(PATHS)]
        fields = {"stream": True} if number % 3 == 0 else {}
        body = body_of(path, rng.choice(texts), **fields)
        direct = gateway.http.post(f"{gateway.servers[number % 2].url}{path}", json=body)
        assert said(gateway.post(body, path, url)) == said(direct), body

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(compare, range(1000 if mode == "streamed" else 100)))
    gateway.until_idle()
    assert gateway.metric("router_picker_other_renderings_total") == 0


def test_a_prompt_goes_back_to_its_cache_and_the_router_has_said_so(gateway: Gateway) -> None:
    body = body_of("/v1/chat/completions", LONG)
    before = gateway.asked()
    first = gateway.post(body, "/v1/chat/completions").json()["usage"]["prompt_tokens_details"]
    assert first["cached_tokens"] == 0

    def foretold() -> int:
        url = f"{gateway.stack.url}/explain/v1/chat/completions"
        overlap: int = gateway.http.post(url, json=body).json()["prompts"][0]["decision"]["overlap_tokens"]
        return overlap

    wait_until(lambda: foretold() > 100, lambda: "the index does not know the prompt")
    expected = foretold()
    for _ in range(6):
        usage = gateway.post(body, "/v1/chat/completions").json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == expected
    assert sorted(after - once for after, once in zip(gateway.asked(), before, strict=True)) == [0, 7]
    explained = gateway.http.get(f"{gateway.envoy.url}/v1/cache/explain/chatcmpl-1").json()
    assert explained["prompts"][0]["cached_tokens"] == expected, explained


def test_the_documented_envoy_leads_to_the_servers(gateway: Gateway, tmp_path: Path) -> None:
    """As it stands in the documentation, with the addresses of this machine."""
    page = (Path(__file__).parents[2] / "docs/gateway.md").read_text()
    (config,) = re.findall(r"```yaml\n(static_resources:\n.*?)```", page, re.DOTALL)
    port = free_port()
    for documented, here in (
        ("address: 0.0.0.0, port_value: 8080", f"address: 127.0.0.1, port_value: {port}"),
        ("address: router-1, port_value: 8180", f"address: 127.0.0.1, port_value: {gateway.picker_port}"),
    ):
        assert config.count(documented) == 1
        config = config.replace(documented, here)
    with running_envoy(tmp_path, config, [port]):
        for path in PATHS:
            for fields in ({}, {"stream": True}):
                answer = gateway.post(body_of(path, LONG, **fields), path, f"http://127.0.0.1:{port}")
                assert answer.status_code == 200, answer.text


def test_a_subset_is_kept_to(gateway: Gateway) -> None:
    for number, server in enumerate(gateway.servers):
        before = gateway.asked()
        for text in range(5):
            body = body_of("/v1/completions", f"{text} {LONG}")
            assert gateway.post(body, url=gateway.envoy.url_of(server.endpoint)).status_code == 200
        after = gateway.asked()
        assert [after[each] - before[each] for each in (number, 1 - number)] == [5, 0]
    refused = gateway.post(body_of("/v1/completions", LONG), url=gateway.envoy.url_of(NOWHERE))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica_available")
    assert refused.headers["retry-after"] == "1"


def test_a_body_of_300_kb(gateway: Gateway) -> None:
    note = "".join(random.Random(1).choices("abcdefgh", k=300_000))
    for url in (gateway.envoy.url, gateway.envoy.buffered_url):
        answer = gateway.post(body_of("/v1/completions", "short", x_note=note), url=url)
        assert answer.status_code == 200
        assert any(body.get("x_note") == note for server in gateway.servers for body in server.bodies[-3:])


def test_errors_are_those_of_the_dialect(gateway: Gateway) -> None:
    for url in (gateway.envoy.url, gateway.envoy.buffered_url):
        for path in PATHS:
            answer = gateway.post(body_of(path, "short", temperature="hot"), path, url)
            assert answer.status_code == 400
            assert answer.headers["content-type"] == "application/json"
            assert "temperature" in answer.json()["error"]["message"]
    assert gateway.http.get(f"{gateway.envoy.url}/v1/models").json()["data"][0]["id"] == MODEL
    assert gateway.post({}, "/v1/embeddings").status_code == 404


def test_beyond_what_may_be_in_flight_there_is_a_429(gateway: Gateway) -> None:
    for server in gateway.servers:
        server.event_seconds = 0.5
    body = body_of("/v1/completions", LONG, stream=True)
    with ThreadPoolExecutor(90) as pool:
        answers = list(pool.map(lambda _: gateway.post(body), range(90)))
    for server in gateway.servers:
        server.event_seconds = 0.0
    counts = Counter(answer.status_code for answer in answers)
    assert counts[200] >= 20 and counts[429] >= 10 and len(counts) == 2, counts
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    gateway.until_idle()


def test_events_of_a_stream_come_as_they_are_said(gateway: Gateway) -> None:
    for server in gateway.servers:
        server.event_seconds = 0.2
    body = body_of("/v1/completions", LONG, stream=True)
    with gateway.http.stream("POST", f"{gateway.envoy.url}/v1/completions", json=body) as answer:
        arrived = [time.monotonic() for _ in answer.iter_raw()]
    for server in gateway.servers:
        server.event_seconds = 0.0
    assert len(arrived) > NUM_WORDS and arrived[-1] - arrived[0] > 0.2 * (NUM_WORDS - 1)


def test_clients_that_leave_give_everything_back(gateway: Gateway) -> None:
    for server in gateway.servers:
        server.event_seconds = 0.3
    body = json.dumps(body_of("/v1/completions", LONG, stream=True)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    port = int(gateway.envoy.url.rpartition(":")[2])
    for sent in (body[:50], body):
        for _ in range(10):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(head % len(body) + sent)
                if sent is body:
                    assert client.recv(1000).startswith(b"HTTP/1.1 200")
                else:
                    time.sleep(0.1)
    for server in gateway.servers:
        server.event_seconds = 0.0
    gateway.until_idle()
    assert gateway.metric("router_runs") == 0
    assert gateway.metric("router_request_errors_total", 'kind="client_gone"') >= 15


def test_a_killed_router_fails_requests_at_once_and_comes_back(gateway: Gateway) -> None:
    gateway.stack.kill("router")
    began = time.monotonic()
    answer = gateway.post(body_of("/v1/completions", LONG))
    assert answer.status_code >= 500 and time.monotonic() - began < 10
    gateway.stack.start("router")
    gateway.stack.wait_ready(2)
    body = body_of("/v1/completions", LONG)
    wait_until(lambda: gateway.post(body).status_code == 200, lambda: "there are no answers")
