"""A router and replicas as processes that speak mutual TLS, from HTTP to the engine and over a renewal."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from loadtests.stacks.local_stack import LocalStack, local_stack, python_command
from replicas.process.tls import TlsFiles
from replicas.process.validity import validities
from tests.certificates import Authority, copied
from tests.integration.observe import records, wait_until
from tests.tools import needed_tool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

ENGINE = {"engine": "simulated", "model_name": "toy", "num_blocks": 4096}


def replica_settings(files: TlsFiles) -> dict[str, object]:
    return {"tls_certificate": files.certificate, "tls_key": files.key, "tls_client_ca": files.ca}


def renew(folder: Path, ca: Authority) -> tuple[TlsFiles, TlsFiles]:
    """Certificates of the replicas and of the router, at paths that stay."""
    replica = copied(ca.replica().trusting(ca), folder / "replica")
    return replica, copied(ca.router().trusting(ca), folder / "router")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[LocalStack]:
    replica, router = renew(folder, Authority(folder / "ca"))
    router_settings = {
        "replica_tls_ca": router.ca,
        "replica_tls_certificate": router.certificate,
        "replica_tls_key": router.key,
    }
    with local_stack(
        num_replicas=2,
        replica_settings={**ENGINE, **replica_settings(replica)},
        router_settings=router_settings,
    ) as running:
        yield running


def log_of(stack: LocalStack, name: str) -> str:
    return (stack.run_directory / f"{name}.log").read_text()


def answer(client: openai.OpenAI, max_tokens: int = 8) -> Iterator[str]:
    """The pieces of a streamed answer; always the same."""
    chunks = client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "What is a replica?"}],
        max_tokens=max_tokens,
        seed=7,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for chunk in chunks:
        if chunk.choices:
            yield chunk.choices[0].delta.content or ""


@pytest.fixture
def client(stack: LocalStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_request_is_answered_over_mutual_tls(client: openai.OpenAI) -> None:
    assert "".join(answer(client))


def router_expiries(stack: LocalStack) -> dict[str, float]:
    name = "router_tls_expiry_timestamp_seconds"
    lines = [
        line
        for line in httpx.get(stack.url + "/metrics", timeout=60).text.splitlines()
        if line.startswith(name + "{")
    ]
    return {line.partition('file="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_the_routers_metrics_tell_when_its_files_expire(stack: LocalStack, folder: Path) -> None:
    ends = {
        file: validities((folder / "router" / name).read_bytes())[0].ends
        for file, name in (("certificate", "tls.crt"), ("ca", "ca.crt"))
    }
    assert router_expiries(stack) == ends


def documented(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Settings of a replica and a router as docs/security.md has them, with the files that it makes."""
    page = (Path(__file__).parents[2] / "docs/security.md").read_text()
    (commands,) = re.findall(r"^```\n(mkdir -m 700 tls\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    subprocess.run(["bash", "-ec", commands], cwd=folder, check=True, capture_output=True)
    of_replicas, of_routers = (
        {
            name: path.replace("/etc/kvasir/tls", str(folder / "tls"))
            for name, path in yaml.safe_load(block).items()
        }
        for block in re.findall(
            r"^```yaml\n(# (?:replicas|routers)\n.*?)^```", page, re.MULTILINE | re.DOTALL
        )
    )
    return of_replicas, of_routers


def test_the_certificates_of_the_documentation_are_good_and_their_keys_their_owners_alone(
    tmp_path: Path,
) -> None:
    needed_tool("openssl")
    of_replicas, of_routers = documented(tmp_path)
    keys = [*(tmp_path / "tls").glob("*.key")]
    assert len(keys) == 3 and not any(key.stat().st_mode & 0o077 for key in keys)
    with local_stack(
        num_replicas=1, replica_settings={**ENGINE, **of_replicas}, router_settings=of_routers
    ) as stack:
        url = stack.url + "/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            assert "".join(answer(client))
        assert (
            validities((tmp_path / "tls/router.crt").read_bytes())[0].ends
            == router_expiries(stack)["certificate"]
        )


def complaint_of(stack: LocalStack, replica_id: str) -> str | None:
    """What the data of the router's page says of it."""
    replicas = httpx.get(stack.url + "/live/state", timeout=60).json()["replicas"]
    return next((replica["complaint"] for replica in replicas if replica["id"] == replica_id), None)


def test_a_replica_without_tls_gets_no_requests_and_the_routers_log_and_page_say_why(
    stack: LocalStack, client: openai.OpenAI
) -> None:
    plain = {"replica_id": "plain", **stack.shared, **ENGINE}
    stack.start("plain", python_command("replicas", plain))
    wait_until(lambda: "plain" in records(stack), "the lease of the replica without TLS")
    wait_until(lambda: "replica plain: " in log_of(stack, "router"), "the router's complaint")
    assert "it does not speak TLS, and this router wants it" in log_of(stack, "router")
    wait_until(lambda: complaint_of(stack, "plain") is not None, "the page's complaint")
    assert complaint_of(stack, "plain") == "it does not speak TLS, and this router wants it"
    assert "".join(answer(client))
    assert complaint_of(stack, "replica-0") is None
    stack.wait_ready(2)
    assert stack.terminate("plain") == 0


def test_a_renewal_of_everything_cuts_no_stream_and_who_comes_later_uses_it(
    stack: LocalStack, client: openai.OpenAI, folder: Path
) -> None:
    whole = "".join(answer(client, max_tokens=300))
    pieces = []
    for number, piece in enumerate(answer(client, max_tokens=300)):
        if number == 10:
            renew(folder, Authority(folder / "another ca"))
        pieces.append(piece)
    assert "".join(pieces) == whole
    assert "is lost" not in log_of(stack, "router")
    stack.kill("replica-0")
    stack.wait_ready(1)
    stack.start("replica-0")  # has never seen the files of old
    stack.wait_ready(2)
    assert "TLS files were renewed" in log_of(stack, "router")
    assert "".join(answer(client, max_tokens=300)) == whole
