"""deploy/compose.yaml as Docker Compose understands it: anchors, merges and relative paths resolved."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.deploy.dockerfile import ROOT

COMPOSE = ROOT / "deploy/compose.yaml"
REPLICAS = ("replica-0", "replica-1")

PASSWORDS = {"KVASIR_REDIS_ROUTER_PASSWORD": "of-routers", "KVASIR_REDIS_REPLICA_PASSWORD": "of-replicas"}

Service = dict[str, Any]


def understood(
    file: Path, folder: Path = COMPOSE.parent, passwords: Mapping[str, str] = PASSWORDS
) -> "subprocess.CompletedProcess[str]":
    """What Docker Compose says to a file, which it checks against the schema of Compose files."""
    compose = Path(sys.executable).with_name("docker-compose")
    return subprocess.run(
        [
            *(compose, "-f", file, "--project-directory", folder, "--env-file", "/dev/null"),
            *("config", "--format", "json"),
        ],
        env={"HOME": "/nonexistent", **passwords},
        capture_output=True,
        text=True,
        check=False,
    )


def compose_project() -> dict[str, Any]:
    done = understood(COMPOSE)
    assert done.returncode == 0, done.stderr
    project: dict[str, Any] = json.loads(done.stdout)
    return project


def dockerfile(service: Service) -> Path:
    return Path(service["build"]["context"], service["build"]["dockerfile"])
