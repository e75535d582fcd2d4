"""The requests that instructions are counted of are answered whole."""

import subprocess
import sys

import pytest


@pytest.mark.timeout(150)
def test_the_router_answers_all_chats_in_one_process() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "loadtests.ratchet.requests"],
        input="streamed 20 1\n\nwhole 20 2\n\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert process.stdout.split() == ["ready", "done"] * 2
