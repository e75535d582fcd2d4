"""Routes that are passed on, behind a router: every client as it is, and nothing of ours in what it gets."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import openai
import pytest

from loadtests.stacks.key_file import write_key_file
from loadtests.stacks.local_stack import LocalStack, local_stack
from router.caller import Limits, Tenant
from tests.cluster.kvasir_command import wait_until
from tests.integration.observe import GAUGES_OF_WORK
from tests.replicas.openai_engine.route_server import ROUTES, SOUND, RouteServer
from tests.replicas.openai_engine.text_server import TextServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

TENANTS = (
    Tenant(name="acme"),
    Tenant(name="operator"),
    Tenant(name="few", limits=Limits(requests_per_minute=2)),
    Tenant(name="small", limits=Limits(tokens_per_minute=20)),
)
USER = {"role": "user", "content": "hello"}


class Passed(NamedTuple):
    """`keys` are texts by the tenant's name. The last of the servers is of another model, and generates."""

    stack: LocalStack
    servers: list[RouteServer]
    keys: dict[str, str]

    def headers(self, tenant: str = "acme") -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[tenant]}"}

    def post(self, path: str, body: object, tenant: str = "acme") -> httpx.Response:
        return httpx.post(self.stack.url + path, json=body, headers=self.headers(tenant), timeout=60)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.stack.url}/v1", api_key=self.keys["acme"], max_retries=0)

    def is_idle(self) -> bool:
        said = httpx.get(f"{self.stack.url}/metrics", headers=self.headers("operator"), timeout=60).text
        found = dict(line.rsplit(" ", 1) for line in said.splitlines() if line.startswith(GAUGES_OF_WORK))
        return len(found) >= len(GAUGES_OF_WORK) and not any(map(float, found.values()))

    def num_came(self) -> int:
        return sum(len(server.came) for server in self.servers)


@pytest.fixture(scope="module")
def module_passed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Passed]:
    """Two servers of one model with all routes, one of another with the speech alone, and one that chats."""
    keys_file = tmp_path_factory.mktemp("keys") / "keys.json"
    keys = write_key_file(keys_file, TENANTS, operators=["operator"])
    servers = [RouteServer(), RouteServer(), RouteServer("loud")]
    wordy = TextServer()
    of_engine = {"engine": "openai", "model_name": "ours"}
    replicas: list[dict[str, object]] = [
        {**of_engine, "engine_url": server.url, "routes": ",".join(ROUTES)} for server in servers[:2]
    ]
    replicas.append({"engine": "openai", "engine_url": servers[2].url, "routes": "/v1/audio/speech"})
    replicas.append({"engine": "openai", "engine_url": wordy.url})
    bodies = keys_file.parent / "bodies"
    settings = {"keys_file": keys_file, "record_bodies": bodies}
    with local_stack(replica_settings=replicas, router_settings=settings) as stack:
        yield Passed(stack, servers, keys)
    assert bodies.read_bytes() == b""  # what is not read is not recorded either
    for server in (*servers, wordy):
        server.close()


@pytest.fixture
def passed(module_passed: Passed) -> Iterator[Passed]:
    for server in module_passed.servers:
        server.fault = ""
        server.came.clear()
    yield module_passed
    wait_until(module_passed.is_idle, lambda: "something is not given back")


def test_openais_client_needs_no_change(passed: Passed) -> None:
    with passed.client() as client:
        found = client.embeddings.create(model="ours", input=["one", "two"])
        assert [each.embedding for each in found.data] == [[0.5, 0.0], [0.5, 1.0]]
        assert found.usage.prompt_tokens == 14
        said = client.audio.transcriptions.create(model="ours", file=("ö.mp3", SOUND, "audio/mpeg"))
        assert said.text == f"vectors: {len(SOUND)} bytes of ö.mp3"
        speech = client.audio.speech.create(model="ours", voice="alloy", input="hello")
        assert (speech.content, speech.response.headers["content-type"]) == (SOUND, "audio/mpeg")
        assert {"ours", "loud", "wordy"} == {model.id for model in client.models.list()}


def test_a_body_goes_on_as_it_is_but_for_the_models_name(passed: Passed) -> None:
    body = b'{"query": "a", "n": 1.50, "model": "ours", "documents": ["b", {"c": 1e-7}]}'
    headers = {**passed.headers(), "content-type": "application/json; charset=utf-8"}
    answer = httpx.post(f"{passed.stack.url}/rerank", content=body, headers=headers, timeout=60)
    assert answer.status_code == 200 and len(answer.json()["results"]) == 2
    ((path, kind, sent),) = [each for server in passed.servers for each in server.came]
    assert (path, kind) == ("/rerank", "application/json; charset=utf-8")
    assert sent == b'{"model":"vectors","query":"a","n":1.50,"documents":["b", {"c": 1e-7}]}'


def test_the_replica_with_the_fewest_requests_is_asked(passed: Passed) -> None:
    async def ask_all() -> Counter[str]:
        async with httpx.AsyncClient(timeout=5.0) as http:
            body, url = {"model": "ours", "input": "the same"}, f"{passed.stack.url}/v1/embeddings"
            asked = [
                asyncio.create_task(http.post(url, json=body, headers=passed.headers())) for _ in range(8)
            ]
            await asyncio.to_thread(wait_until, lambda: passed.num_came() == 8, lambda: "not all came")
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return Counter({server.url: len(server.came) for server in passed.servers})

    for server in passed.servers:
        server.fault = "hangs"
    counts = asyncio.run(ask_all())
    assert sorted(counts.values()) == [0, 4, 4]
    # The clients have left, and so has each server's request.
    wait_until(lambda: not any(server.num_open for server in passed.servers), lambda: "a server still works")


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/embeddings", {"input": "without a name"}, 200, ""),
        ("/v1/audio/speech", {"input": "of two models"}, 400, "Missing required parameter: 'model'"),
        ("/v1/embeddings", {"model": "loud", "input": ""}, 400, "do not have /v1/embeddings. It is passed"),
        ("/v1/embeddings", {"model": "wordy", "input": ""}, 400, "It is passed on for: ours."),
        ("/v1/embeddings", {"model": "none", "input": ""}, 404, "none"),
        ("/v1/embeddings", ["none"], 400, "The request body cannot be read: it is no JSON object"),
        ("/pooling", {"model": "ours", "input": ""}, 404, "No server here has this route"),
        ("/v1/chat/completions", {"model": "ours", "messages": [USER]}, 400, "generates nothing"),
    ],
)
def test_what_cannot_be_passed_on_is_told(
    passed: Passed, path: str, body: object, status: int, words: str
) -> None:
    answer = passed.post(path, body)
    assert answer.status_code == status, answer.text
    assert words in answer.text
    assert passed.num_came() == (status == 200)


def test_a_servers_error_is_the_clients_and_what_may_have_been_done_is_not_done_again(
    passed: Passed,
) -> None:
    body = {"model": "ours", "input": "a"}

    def ask(fault: str) -> tuple[int, object, int]:
        for server in passed.servers:
            server.fault = fault
            server.came.clear()
        answer = passed.post("/v1/embeddings", body)
        return answer.status_code, answer.json()["error"], passed.num_came()

    assert ask("refuses") == (400, {"message": "too long", "type": "theirs", "code": 400}, 1)
    status, error, num_came = ask("is full")
    assert (status, error, num_came) == (503, {"message": "no slot is free"}, 2)
    for _ in range(2):
        status, error, num_came = ask("breaks off")
        assert (status, num_came) == (502, 1) and "breaks off" in json.dumps(error)
    with pytest.raises(httpx.RemoteProtocolError):
        ask("breaks off later")


def test_keys_limits_and_usage_count_what_is_passed_on(passed: Passed) -> None:
    body = {"model": "ours", "input": ["a", "b"]}
    answers = [passed.post("/v1/embeddings", body, "few").status_code for _ in range(4)]
    assert answers == [200, 200, 429, 429]
    answers = [passed.post("/v1/embeddings", body, "small").status_code for _ in range(3)]
    assert answers == [200, 200, 429]  # of 20 tokens the first leaves six
    nobody = httpx.post(f"{passed.stack.url}/v1/embeddings", json=body, timeout=60)
    assert nobody.status_code == 401

    def counted() -> tuple[int, int, int]:
        url = f"{passed.stack.url}/v1/usage"
        total = httpx.get(url, headers=passed.headers("small"), timeout=60).json()["total"]
        return total["requests"], total["prompt_tokens"], total["output_tokens"]

    wait_until(lambda: counted()[:2] >= (2, 28), lambda: str(counted()))
    assert counted()[1:] == (28, 0)


def test_the_routes_stand_in_the_document_and_a_form_is_taken_by_them_alone(passed: Passed) -> None:
    paths = httpx.get(f"{passed.stack.url}/openapi.json", timeout=60).json()["paths"]
    assert set(ROUTES) <= set(paths) and "/pooling" not in paths
    form = {"data": {"model": "ours"}, "files": {"file": b"a"}, "headers": passed.headers(), "timeout": 60}
    for path, status in (("/v1/embeddings", 415), ("/v1/audio/translations", 404)):
        assert httpx.post(passed.stack.url + path, **form).status_code == status
    foreign = {**passed.headers(), "origin": "https://other.example"}
    url = f"{passed.stack.url}/v1/audio/transcriptions"
    assert httpx.post(url, **{**form, "headers": foreign}).status_code == 403
