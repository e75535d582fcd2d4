"""What `helm test` runs, run here: it passes where users share a prefix, and fails where they do not."""

import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.stacks.local_stack import free_port, local_stack
from tests.helm.chart import FOLDER, named, rendered
from tests.router.features.api_keys.documents import numbered_key, yaml_of

SCRIPT = FOLDER / "files" / "check_cached_tokens.py"

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def check(address: str, *, timeout_seconds: int = 60, key: str | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-I", str(SCRIPT), address, str(timeout_seconds)],
        capture_output=True,
        text=True,
        check=False,
        env=None if key is None else {"KVASIR_API_KEY": key},
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_the_chart_runs_the_script_as_it_is() -> None:
    script = named("ConfigMap", "demo-kvasir-test", rendered("laptop"))["data"]["check_cached_tokens.py"]
    assert script.strip() == SCRIPT.read_text(encoding="utf-8").strip()
    (container,) = named("Pod", "demo-kvasir-test", rendered("laptop"))["spec"]["containers"]
    assert container["command"] == [
        "python",
        "/test/check_cached_tokens.py",
        "http://demo-kvasir-router:80",
        "300",
    ]


def test_it_passes_again_and_again_where_a_second_user_finds_what_the_first_has_computed() -> None:
    settings = {"engine": "simulated", "model_name": "toy", "simulated_hardware": "instant"}
    with local_stack(num_replicas=2, replica_settings=settings) as stack:
        for _ in range(2):
            status, output = check(stack.url)
            assert status == 0, output
            assert output.startswith("ok: toy: ")


def test_it_fails_where_the_second_user_is_sent_elsewhere() -> None:
    settings = {"engine": "simulated", "model_name": "toy", "simulated_hardware": "instant"}
    with local_stack(
        num_replicas=2, replica_settings=settings, router_settings={"policy": "round_robin"}
    ) as stack:
        status, output = check(stack.url)
    assert status == 1
    assert output.startswith("FAILED: toy: 0 of the second user's ")


def test_it_fails_where_nobody_answers() -> None:
    status, output = check(f"http://127.0.0.1:{free_port()}", timeout_seconds=1)
    assert status == 1
    assert "does not answer" in output


def test_it_asks_for_a_key_where_it_needs_one(tmp_path: Path) -> None:
    _, key = numbered_key(1)
    (tmp_path / "keys.yaml").write_bytes(yaml_of(1))
    settings = {"engine": "simulated", "model_name": "toy", "simulated_hardware": "instant"}
    router_settings = {"keys_file": str(tmp_path / "keys.yaml")}
    with local_stack(num_replicas=1, replica_settings=settings, router_settings=router_settings) as stack:
        status, output = check(stack.url)
        assert status == 1
        assert output.endswith("asks for an API key: set test.apiKeySecret to a Secret with one\n")
        status, output = check(stack.url, key=key)
    assert status == 0, output
