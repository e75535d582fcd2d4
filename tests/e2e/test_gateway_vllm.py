"""A real Envoy whose endpoint picker is a router, in front of two real vLLM servers."""

import importlib.util
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from loadtests.benches.peers import start_servers
from loadtests.stacks.local_stack import LocalStack, free_port, local_stack
from loadtests.stacks.vllm_server import BLOCK_SIZE, MODEL
from replicas.vllm_engine.environment import vllm_environment
from tests.e2e.test_gateway import PATHS, body_of
from tests.envoy_server import Envoy

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed: ./kvasir test --all installs it",
    ),
]

SETTLE_SECONDS = 0.2
"""Events of a step may come after its answer."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Envoy, LocalStack, list[str]]]:
    picker_port, folder = free_port(), tmp_path_factory.mktemp("vllm")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_environment(1).items():
            patch.setenv(name, value)
        started = LocalStack(folder, None, None)
        try:
            servers = start_servers(started, 24 * 2**20)
            endpoints = [urlsplit(server.url).netloc for server in servers]
            envoy = Envoy(picker_port, [[each] for each in endpoints])
            replicas = [
                {
                    "engine": "remote",
                    "engine_url": server.url,
                    "engine_endpoint": endpoint,
                    "model_name": MODEL,
                    "index_stride": BLOCK_SIZE,
                }
                for server, endpoint in zip(servers, endpoints, strict=True)
            ]
            router = {"picker_port": picker_port, "index_stride": BLOCK_SIZE}
            with (
                envoy.running(tmp_path_factory.mktemp("envoy")),
                local_stack(num_replicas=2, replica_settings=replicas, router_settings=router) as stack,
            ):
                yield envoy, stack, [server.url for server in servers]
        finally:
            started.stop()


def _text_and_cached(path: str, answer: dict[str, Any]) -> tuple[object, int]:
    usage = answer["usage"]
    match path:
        case "/v1/completions":
            return answer["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]
        case "/v1/chat/completions":
            return answer["choices"][0]["message"]["content"], usage["prompt_tokens_details"]["cached_tokens"]
        case "/v1/messages":
            return answer["content"], usage.get("cache_read_input_tokens", 0)
        case _:
            said = [part["text"] for item in answer["output"] for part in item.get("content") or ()]
            return said, usage["input_tokens_details"]["cached_tokens"]


def test_answers_are_those_of_the_servers_and_hits_are_foretold(
    gateway: tuple[Envoy, LocalStack, list[str]],
) -> None:
    envoy, stack, urls = gateway
    rng = random.Random(1)
    heads = [" ".join(rng.choices("river stone lamp garden wind".split(), k=150)) for _ in range(6)]
    found: Counter[tuple[str, str]] = Counter()
    with httpx.Client(timeout=120, trust_env=False) as http:
        for number in range(60):
            path = PATHS[number % len(PATHS)]
            body = body_of(path, f"{rng.choice(heads)} and {number}?") | {"model": MODEL, "temperature": 0}
            decision = http.post(f"{stack.url}/explain{path}", json=body).json()["prompts"][0]["decision"]
            told = http.post(f"{envoy.url}{path}", json=body)
            assert told.status_code == 200, told.text
            text, cached = _text_and_cached(path, told.json())
            direct = http.post(f"{urls[number % 2]}{path}", json=body | {"cache_salt": f"direct {number}"})
            assert text == _text_and_cached(path, direct.json())[0], body
            found[path, "right" if cached == decision["overlap_tokens"] else "wrong"] += 1
            found[path, "cached"] += cached
            time.sleep(SETTLE_SECONDS)
    for path in PATHS:
        assert found[path, "wrong"] == 0 and found[path, "cached"] > 1000, found
