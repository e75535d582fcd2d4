"""`kvasir up --join` in front of two servers: prompts meet their cache, and one may die and come back."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from replicas.toy_model import checkpoint_directory
from replicas.toy_model.make_hybrid_model import write_hybrid_model
from tests.cluster.kvasir_command import KvasirCommand, wait_until
from tests.llama_server import LlamaServer
from tests.replicas.remote_engine.stand_in import StandIn
from tests.replicas.remote_engine.test_vllm_server import serving
from tests.toy_gguf import write_toy_gguf

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

LONG = "one river, two stones, three lamps and seven gardens " * 12


@pytest.fixture
def servers() -> Iterator[list[StandIn]]:
    servers = [StandIn(), StandIn()]
    yield servers
    for server in servers:
        server.close()


def ask(url: str, text: str) -> dict[str, Any]:
    body = {"model": "served", "messages": [{"role": "user", "content": text}], "max_tokens": 3}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    headers = {name: answer.headers[f"x-kvasir-{name}"] for name in ("replica", "cache")}
    return {**headers, **usage["prompt_tokens_details"]}


def names(url: str) -> list[str]:
    return [model["id"] for model in httpx.get(f"{url}/v1/models", timeout=60).json()["data"]]


def foretold(url: str, text: str) -> int:
    """Tokens that the router believes to be cached where the prompt would go."""
    body = {"model": "served", "messages": [{"role": "user", "content": text}]}
    explained = httpx.post(f"{url}/explain/v1/chat/completions", json=body, timeout=60).json()
    overlap: int = explained["prompts"][0]["decision"]["overlap_tokens"]
    return overlap


def ready_epochs(kvasir: KvasirCommand) -> set[str | None]:
    return {replica.epoch for replica in kvasir.state().replicas if replica.state == "ready"}


def test_two_servers_behind_one_router(servers: list[StandIn], tmp_path: Path) -> None:
    kvasir = KvasirCommand(tmp_path / "run")
    words = [word for server in servers for word in ("--join", server.url)]
    model = str(checkpoint_directory(None))
    with kvasir.up(*words, "--model", model, "--set", "index_stride=16"):
        url = kvasir.state().router_url
        first = ask(url, LONG)
        assert first["cached_tokens"] == 0
        wait_until(lambda: ask(url, LONG)["cached_tokens"] > 100, lambda: "the prompt is not found again")
        assert ask(url, LONG)["replica"] == first["replica"]
        other = KvasirCommand(tmp_path / "other").run("up", "--join", url)
        assert f"kvasir: {url} cannot be joined: it is a router of Kvasir" in other.stderr
        assert other.stderr.count("\n") == 1
        shown = kvasir.run("status")
        for server in servers:
            assert f"127.0.0.1-{server.port}-0" in shown.stdout

        # One of them loads an adapter and is given another name, the other one unloads its adapter.
        servers[0].other_names, servers[0].adapters = ["gpt-4o"], {"later": "/adapters/later"}
        servers[1].adapters = {}
        wait_until(lambda: names(url) == ["served", "gpt-4o", "later"], lambda: str(names(url)))
        for name, status in (("gpt-4o", 200), ("later", 200), ("tuned", 404)):
            body = {"model": name, "prompt": "Hi", "max_tokens": 1}  # LONG stays cached
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == status, answer.text

        its_port = int(first["replica"].split("-")[1])
        (dying,) = [server for server in servers if server.port == its_port]
        epochs = {replica.epoch for replica in kvasir.state().replicas}
        dying.started_at += 1
        wait_until(
            lambda: len(epochs | ready_epochs(kvasir)) == 3 and len(ready_epochs(kvasir)) == 2,
            lambda: str(kvasir.state().replicas),
        )
        # What a warm server holds is known from its replay, before anything is sent to it.
        wait_until(lambda: foretold(url, LONG) > 100, lambda: "the replay is not believed")
        assert ask(url, LONG)["cached_tokens"] > 100


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    kvasir = KvasirCommand(tmp_path / "run")
    ended = kvasir.run("up", "--join", "http://127.0.0.1:1")
    assert ended.returncode != 0
    assert "http://127.0.0.1:1 cannot be joined" in ended.stderr


def test_servers_that_differ_are_not_joined(servers: list[StandIn], tmp_path: Path) -> None:
    kvasir = KvasirCommand(tmp_path / "run")
    servers[1].served_name = "other"
    ended = kvasir.run("up", "--join", servers[0].url, "--join", servers[1].url)
    assert "they cannot share a name" in ended.stderr
    alone = kvasir.run("up", "--join", servers[0].url)
    assert "give --model DIR" in alone.stderr
    servers[0].key = "sesame"
    locked = kvasir.run("up", "--join", servers[0].url)
    assert locked.stderr.startswith(f"kvasir: {servers[0].url} cannot be joined: ")
    assert (
        "answers 401: Unauthorized: it wants an API key, or another one: give --join-key-file FILE"
        in locked.stderr
    )


needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: ./kvasir test --all installs it",
)


@pytest.mark.vllm
@pytest.mark.timeout(900)
@needs_vllm
def test_a_vllm_server_of_a_model_that_the_torch_engine_does_not_have(tmp_path: Path) -> None:
    write_hybrid_model("gpt_oss", model := tmp_path / "model")
    kvasir = KvasirCommand(tmp_path / "run")
    options = ("--served-model-name", "served", "--num-gpu-blocks-override", "512")
    with serving(tmp_path / "log", *options, model=model) as (joined, server):
        wait_until(lambda: server.poll() is not None or is_up(joined), (tmp_path / "log").read_text, 500.0)
        with kvasir.up("--join", joined):
            url = kvasir.state().router_url
            causes = [ask(url, LONG + f"and {word} " * 60)["cache"] for word in ("one", "two", "three")]
    assert [cause.split("; ")[0] for cause in causes] == ["miss", "miss", "partial"]
    assert causes[1].endswith("cause=not_resumable")


@pytest.mark.vllm
@pytest.mark.timeout(900)
@needs_vllm
def test_a_vllm_server_that_generates_nothing(tmp_path: Path) -> None:
    """What it answers through a router is what it answers itself."""
    text = "The quick brown fox"
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": [text, "a"]},
        "/pooling": {"input": text},
        "/score": {"text_1": text, "text_2": [text, "a"]},
        "/rerank": {"query": text, "documents": ["a", text]},
    }

    def asked(url: str, path: str, name: str) -> dict[str, Any]:
        answer = httpx.post(url + path, json={"model": name, **bodies[path]}, timeout=60)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return {field: value for field, value in found.items() if field not in ("id", "created")}

    kvasir = KvasirCommand(tmp_path / "run")
    with serving(tmp_path / "log", "--runner", "pooling", "--convert", "embed") as (joined, server):
        wait_until(lambda: server.poll() is not None or is_up(joined), (tmp_path / "log").read_text, 500.0)
        own = {path: asked(joined, path, "toy") for path in bodies}
        with kvasir.up("--engine", "openai", "--join", joined, "--set", f"routes={','.join(bodies)}"):
            url = kvasir.state().router_url
            assert names(url) == ["toy", "gpt-4o"]
            assert {path: asked(url, path, "gpt-4o") for path in bodies} == own
            chat = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}
            answer = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60)
            assert answer.status_code == 400 and "generates nothing" in answer.text
            used = httpx.get(f"{url}/v1/usage", timeout=60).json()["total"]
            assert used["unreported_tokens"] >= sum(each["usage"]["prompt_tokens"] for each in own.values())


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_servers_that_take_no_tokens(tmp_path: Path) -> None:
    """Real ones, of llama.cpp."""
    kvasir = KvasirCommand(tmp_path / "run")
    write_toy_gguf(tmp_path / "toy.gguf")
    servers = [LlamaServer(tmp_path / "toy.gguf") for _ in range(2)]
    words = [word for server in servers for word in ("--join", server.url)]
    body = {"model": "toy", "messages": [{"role": "user", "content": LONG}], "max_tokens": 3}
    try:
        with kvasir.up("--engine", "openai", *words):
            url = f"{kvasir.state().router_url}/v1/chat/completions"
            first, again = [
                httpx.post(url, json=body | {"model": name}, timeout=60) for name in ("toy", "toy-too")
            ]
            assert "timings" in first.json()
            assert again.headers["x-kvasir-replica"] == first.headers["x-kvasir-replica"]
            assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 90
            assert "predicted" in kvasir.run("status").stdout
    finally:
        for server in servers:
            server.kill()
