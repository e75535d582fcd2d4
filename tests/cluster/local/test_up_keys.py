"""`kvasir up --keys`: who has no key is not let in, and the cluster's own commands find their way."""

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from cluster.cli import main
from loadtests.stacks.local_stack import free_port
from tests.cluster.kvasir_command import KvasirCommand, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CHAT = {"model": "toy_model", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}


PAGE = "https://chat.example.org"
CORS = ("--cors-origin", "http://localhost:3000", "--cors-origin", PAGE)


PICKER_PORT = free_port()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KvasirCommand, str]]:
    """A cluster with keys, and one of them."""
    folder = tmp_path_factory.mktemp("keys")
    command = KvasirCommand(folder / "run")
    file = folder / "keys.yaml"
    key = command.run("keys", "create", "--file", str(file), "--tenant", "acme").stdout.strip()
    gateways = ("--picker-port", str(PICKER_PORT))
    with command.up("--replicas", "1", "--keys", os.path.relpath(file), *CORS, *gateways):
        yield command, key


def status(command: KvasirCommand, key: str | None) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    url = f"{command.state().router_url}/v1/chat/completions"
    return httpx.post(url, json=CHAT, headers=headers, trust_env=False, timeout=60).status_code


def test_the_api_asks_for_a_key_and_the_page_has_a_port_of_its_own(keyed: tuple[KvasirCommand, str]) -> None:
    command, key = keyed
    assert [status(command, given) for given in (None, key[:-1] + "?", key)] == [401, 401, 200]
    (page,) = command.state().router_pages
    assert page.startswith("http://127.0.0.1:") and page != command.state().router_url
    metrics = httpx.get(f"{page}/metrics", trust_env=False, timeout=60).text
    assert "\nrouter_keys 1" in metrics
    assert httpx.get(f"{page}/live/state", trust_env=False, timeout=60).status_code == 200
    for path in ("/metrics", "/live/state"):
        url = command.state().router_url + path
        assert httpx.get(url, headers={"authorization": f"Bearer {key}"}).status_code in (403, 404)


def test_pages_of_the_origins_that_were_named_may_call_the_api(keyed: tuple[KvasirCommand, str]) -> None:
    url = f"{keyed[0].state().router_url}/v1/chat/completions"
    for page in (PAGE, "http://localhost:3000", "https://evil.example.org"):
        asks = {"origin": page, "access-control-request-method": "POST"}
        answer = httpx.options(url, headers=asks, trust_env=False, timeout=60)
        allowed = answer.headers.get("access-control-allow-origin")
        assert allowed == (None if "evil" in page else page)


def test_gateways_have_a_port_and_replicas_that_they_are_not_sent_to_are_named(
    keyed: tuple[KvasirCommand, str],
) -> None:
    command, _ = keyed
    with grpc.insecure_channel(f"127.0.0.1:{PICKER_PORT}") as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=30) == b"\x08\x01"
    log = command.directory.logs / "router.log"
    wait_until(lambda: "gateways are not sent to replica " in log.read_text(), log.read_text)


def test_keys_are_made_and_revoked_while_it_runs(keyed: tuple[KvasirCommand, str]) -> None:
    command, _ = keyed
    key = command.run("keys", "create", "--tenant", "beta").stdout.strip()
    wait_until(lambda: status(command, key) == 200, lambda: "the key is not known")
    assert command.run("keys", "revoke", key.split("-")[2]).returncode == 0
    wait_until(lambda: status(command, key) == 401, lambda: "the key is still let in")


def test_the_commands_know_the_key(keyed: tuple[KvasirCommand, str]) -> None:
    command, key = keyed
    refused = command.run("chat", stdin="Hello\n")
    assert "401" in refused.stdout + refused.stderr
    assert "prompt" in command.run("chat", "--api-key", key, stdin="Hello\n").stdout
    command.environment["OPENAI_API_KEY"] = key
    assert "prompt" in command.run("chat", stdin="Hello\n").stdout
    command.environment["OPENAI_API_KEY"] = "sk-of-another-service"
    refused = command.run("chat", stdin="Hello\n")
    assert "401" in refused.stdout + refused.stderr
    del command.environment["OPENAI_API_KEY"]
    assert "router" in command.run("status").stdout
    assert "It would go to" in command.run("explain", "Hello").stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--host", "0.0.0.0"),
            "without API keys, everyone who reaches 0.0.0.0 would be one tenant",
        ),
        (("--keys", "/nowhere.yaml"), "there is no file /nowhere.yaml"),
        (("--keys", "/dev/null"), "/dev/null is wrong: it is empty"),
        (("--cors-origin", "chat.example.org"), "--cors-origin takes an origin as browsers name it, such as"),
        (("--keys", "x", "--open"), "--open is for a cluster without --keys"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(
    tmp_path: Path, words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", *words, "--run-dir", str(tmp_path / "run")]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())
