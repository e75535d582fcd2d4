"""Two real llama.cpp servers behind a router: answers pass as they are, chats find their cache, one dies."""

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import httpx
import pytest

from loadtests.stacks.local_stack import LocalStack, local_stack
from tests.cluster.kvasir_command import wait_until
from tests.llama_server import LlamaServer
from tests.toy_gguf import write_toy_gguf

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

LONG = "one river, two stones, three lamps and seven gardens " * 12
CHAT = {"messages": [{"role": "user", "content": "hello there, who are you"}]}
BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("/v1/completions", {"prompt": "hello there, who are you"}),
    ("/v1/messages", {**CHAT, "system": "be kind"}),
]
LONGEST = 3500
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
OWN = re.compile(rb',?"(id|created|timings)":("[^"]*"|\d+|\{[^}]*\})')
"""Fields that differ whenever a request is sent again; where a stream has its timings differs too."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LlamaServer]]:
    model = tmp_path_factory.mktemp("llama") / "toy.gguf"
    write_toy_gguf(model)
    servers = [LlamaServer(model), LlamaServer(model)]
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def stack(servers: list[LlamaServer]) -> Iterator[LocalStack]:
    replicas = [{"engine": "openai", "engine_url": server.url} for server in servers]
    with local_stack(replica_settings=replicas) as stack:
        yield stack


def with_sampling(body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "toy", "max_tokens": 12, "temperature": 0, **body, **fields}


def ask(stack: LocalStack, body: object, path: str = "/v1/chat/completions") -> httpx.Response:
    return httpx.post(stack.url + path, json=body, timeout=60)


def said(answer: bytes) -> bytes:
    return OWN.sub(b"", answer)


@pytest.mark.parametrize("more", [{}, {"stream": True}, WITH_USAGE])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_an_answer_is_its_servers_own(
    stack: LocalStack, servers: list[LlamaServer], path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    body = with_sampling(body, **more)
    for server in servers:
        server.ask(path, body)
    direct = servers[0].ask(path, body)
    answer = ask(stack, body, path)
    assert answer.status_code == 200, answer.text
    assert said(answer.content) == said(direct.content)
    assert answer.headers["content-type"].split(";")[0] == direct.headers["content-type"].split(";")[0]


def explained(stack: LocalStack, body: object) -> dict[str, Any]:
    prompt: dict[str, Any] = ask(stack, body, "/explain/v1/chat/completions").json()["prompts"][0]
    assert all(candidate["is_predicted"] for candidate in prompt["candidates"])
    return prompt


def expected(stack: LocalStack, body: object) -> int:
    """Tokens that the router predicts to be cached where the prompt would go."""
    overlap: int = explained(stack, body)["decision"]["overlap_tokens"]
    return overlap


def test_a_chat_goes_on_where_it_began(stack: LocalStack) -> None:
    chats = [[{"role": "user", "content": f"{number}: {LONG}"}] for number in range(8)]
    with ThreadPoolExecutor() as clients:
        bodies = [with_sampling({"messages": messages}) for messages in chats]
        firsts = [*clients.map(lambda body: ask(stack, body), bodies)]
    for messages, first in zip(chats, firsts, strict=True):
        said = first.json()
        messages += [said["choices"][0]["message"], {"role": "user", "content": "and what else?"}]
        body = with_sampling({"messages": messages})
        wait_until(lambda body=body: expected(stack, body) > 500, lambda: "the chat is not expected anywhere")
        again = ask(stack, body)
        assert again.headers["x-kvasir-replica"] == first.headers["x-kvasir-replica"]
        cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= said["usage"]["prompt_tokens"] - 1
        assert again.json()["timings"]["cache_n"] == cached


def num_running(servers: list[LlamaServer]) -> int:
    return sum(server.num_running() for server in servers)


def num_computed(servers: list[LlamaServer]) -> float:
    return sum(server.metric("tokens_predicted_total") for server in servers)


def test_requests_take_the_slots_of_both_servers(stack: LocalStack) -> None:
    body = with_sampling(CHAT, max_tokens=500, ignore_eos=True)
    with ThreadPoolExecutor() as clients:
        answers = [*clients.map(lambda _: ask(stack, body), range(8))]
    used = Counter(answer.headers["x-kvasir-replica"] for answer in answers)
    assert len(used) == 2 and min(used.values()) >= 2


def test_a_client_that_leaves_frees_its_slot(stack: LocalStack, servers: list[LlamaServer]) -> None:
    before = num_computed(servers)
    body = with_sampling(CHAT, stream=True, max_tokens=LONGEST, ignore_eos=True)
    with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert len([*islice(lines, 20)]) == 20
        assert num_running(servers) == 1
    wait_until(lambda: not num_running(servers), lambda: "its slot is taken")
    assert 9 < num_computed(servers) - before < LONGEST


def test_one_server_is_killed_and_comes_back(stack: LocalStack, servers: list[LlamaServer]) -> None:
    """What it has begun to stream ends with an error, and what it has not is answered by the other."""
    body = with_sampling(CHAT, max_tokens=LONGEST, ignore_eos=True)
    url = f"{stack.url}/v1/chat/completions"
    with (
        ThreadPoolExecutor() as clients,
        httpx.stream("POST", url, json={**body, **WITH_USAGE}, timeout=60) as stream,
    ):
        lines = stream.iter_lines()
        assert len([*islice(lines, 20)]) == 20
        killed = stream.headers["x-kvasir-replica"]
        server = servers[int(killed[-1])]
        whole = {**body, "max_tokens": 500}
        answers = [clients.submit(ask, stack, whole) for _ in range(4)]
        wait_until(lambda: num_running(servers) >= 2, lambda: "the others have not begun")
        server.kill()
        assert "could not be resumed" in [line for line in lines if line][-1]
        for answer in answers:
            assert answer.result().json()["usage"]["completion_tokens"] == 500

    wait_until(lambda: stack.exit_status(killed) == 1, lambda: "its replica has not ended")
    stack.start(killed)
    server.start()
    stack.wait_ready(2)
    candidates = explained(stack, body)["candidates"]
    assert [each["overlap_tokens"] for each in candidates if each["replica"] == killed] == [0]
