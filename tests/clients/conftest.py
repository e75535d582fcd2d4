"""One live cluster for all client libraries, and the environments in which they run.

The cluster has a router and two simulated replicas whose model says what `words.py` has. The environments lie
beside the project's own: `./kvasir test --all` makes them.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from loadtests.stacks.local_stack import LocalStack, local_stack
from tests.clients.words import RULES
from tests.talking_model import make_talking_model
from tests.tools import needed_tool, not_here

ENVIRONMENTS = Path(sys.prefix) / "clients"
SCRIPTS = Path(__file__).resolve().parent / "scripts"
SCRIPT_SECONDS = 200.0

OFFLINE = {"NO_PROXY": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "true", "OPENAI_AGENTS_DISABLE_TRACING": "true"}
"""So that libraries call nobody but the cluster."""

Seen = Mapping[str, Any]
"""Of each scene, what its script saw."""


@pytest.fixture(scope="session")
def talking_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with talking_stack(tmp_path_factory.mktemp("talking"), RULES) as stack:
        yield stack


@contextlib.contextmanager
def talking_stack(
    folder: Path,
    rules: Mapping[str, str],
    replica_settings: Mapping[str, object] | None = None,
    router_settings: Mapping[str, object] | None = None,
) -> Iterator[LocalStack]:
    """Two replicas whose model, in `folder/talking`, answers by the rules."""
    script = folder / "words.json"
    script.write_text(json.dumps([{"when": when, "say": say} for when, say in rules.items()]), "utf-8")
    settings = {
        "engine": "simulated",
        "simulated_hardware": "instant",
        "simulated_script": script,
        "model": make_talking_model(folder / "talking"),
        "num_blocks": 16_384,
        **(replica_settings or {}),
    }
    with local_stack(num_replicas=2, replica_settings=settings, router_settings=router_settings) as stack:
        yield stack


def client_environment(name: str) -> Path:
    """The folder of one. Where it is missing the test is skipped, and fails if CI is set."""
    folder = ENVIRONMENTS / name
    if not folder.is_dir():
        not_here(f"{folder} is missing: ./kvasir test --all makes it where it reaches the package registries")
    return folder


def act(environment: str, script: str, stack: LocalStack | None = None) -> Seen:
    """What the script saw in that environment of Python, of a cluster or of its library alone."""
    python = client_environment(environment) / "bin" / "python"
    return _run([str(python), str(SCRIPTS / script), *([] if stack is None else [stack.url])], {})


def act_in_node(script: str, stack: LocalStack) -> Seen:
    modules = client_environment("node") / "node_modules"
    return _run([needed_tool("node"), str(SCRIPTS / script), stack.url], {"NODE_PATH": str(modules)})


def _run(command: list[str], more: Mapping[str, str]) -> Seen:
    """Nothing of this machine's settings for the vendors' own services reaches the script."""
    kept = ("PATH", "HOME", "LANG", "TMPDIR")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    done = subprocess.run(
        command,
        env={**environment, **OFFLINE, **more},
        capture_output=True,
        text=True,
        timeout=SCRIPT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{shutil.which(command[0])} {command[1]}:\n{done.stderr[-4000:]}"
    seen: Seen = json.loads(done.stdout.splitlines()[-1])  # libraries print, too
    return seen
