"""What `helm test` runs, run here: it passes where users share a prefix, and fails where they do not."""

import subprocess
import sys

import pytest

from loadtests.stacks.local_stack import free_port, local_stack
from tests.helm.chart import FOLDER, named, rendered

SCRIPT = FOLDER / "files" / "check_cached_tokens.py"

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def check(address: str, *, timeout_seconds: int = 60) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-I", str(SCRIPT), address, str(timeout_seconds)],
        capture_output=True,
        text=True,
        check=False,
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
    settings = {"engine": "torch", "model_name": "toy", "num_threads": 1}
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
