"""Images built and run with buildah, without a daemon and without namespaces (chroot isolation)."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.dockerfile import ROOT

BASE = "localhost/kvasir-base:bookworm"
ENVIRONMENT = {**os.environ, "BUILDAH_ISOLATION": "chroot"}


def need_buildah() -> None:
    """Skips, saying why, where no image can be built."""
    if os.geteuid() != 0:
        pytest.skip("building images without a daemon needs root here")
    for tool in ("buildah", "mmdebstrap"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (Debian: apt-get install {tool})")


def buildah(*arguments: str | Path) -> str:
    done = subprocess.run(
        ["buildah", *arguments], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def local_base() -> str:
    """The base image that deploy/images/make-debian-base makes, made if it is not there yet."""
    there = subprocess.run(["buildah", "inspect", "--type", "image", BASE], capture_output=True, check=False)
    if there.returncode != 0:
        made = ROOT / "deploy/images/make-debian-base"
        done = subprocess.run([made, BASE], env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return BASE


def wheel_folders() -> list[str]:
    """Local folders of wheels that pip has been told of: where they have torch, no other is asked for."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    values = [
        line.partition("=")[2].strip("'") for line in listed.stdout.splitlines() if "find-links" in line
    ]
    return sorted({folder for value in values for folder in value.split() if Path(folder).is_dir()})


@dataclass(frozen=True, slots=True)
class Image:
    name: str
    base_bytes: int

    @property
    def config(self) -> dict[str, Any]:
        """User, environment, entrypoint, health check, as the image itself says."""
        found: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", self.name))["Docker"][
            "config"
        ]
        return found

    @property
    def own_bytes(self) -> int:
        """Uncompressed, beyond the base image."""
        return image_bytes(self.name) - self.base_bytes

    @contextlib.contextmanager
    def running(self, environment: Mapping[str, str]) -> Iterator["Container"]:
        """Its entrypoint as its user, on the network of this machine."""
        container = Container(buildah("from", self.name), self.config, environment)
        process = subprocess.Popen(
            container.command(self.config["Entrypoint"]), env=ENVIRONMENT, start_new_session=True
        )
        try:
            yield container
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            buildah("rm", container.name)


@dataclass(frozen=True, slots=True)
class Container:
    name: str
    config: dict[str, Any]
    environment: Mapping[str, str]

    def command(self, words: list[str]) -> list[str]:
        variables = [word for pair in self.environment.items() for word in ("--env", "=".join(pair))]
        return ["buildah", "run", "--user", self.config["User"], *variables, self.name, "--", *words]

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.command(list(words)), env=ENVIRONMENT, capture_output=True, text=True, check=False
        )

    def is_healthy(self) -> bool:
        """What the image's own health check says."""
        kind, *words = self.config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.run(*words).returncode == 0


def image_bytes(name: str) -> int:
    """Of all layers, uncompressed."""
    manifest = json.loads(json.loads(buildah("inspect", "--type", "image", name))["Manifest"])
    return sum(layer["size"] for layer in manifest["layers"])


def build(kind: str, *options: str) -> Image:
    """deploy/images/KIND.Dockerfile on the local base. Docker's format: the other one has no health check."""
    base = local_base()
    name = f"localhost/kvasir-test-{kind}"
    buildah(
        *("bud", "--format", "docker", "--build-arg", f"BASE={base}", *options),
        *("--file", f"deploy/images/{kind}.Dockerfile", "--tag", name, "."),
    )
    image = Image(name, image_bytes(base))
    sys.stdout.write(f"{kind} image: {image.own_bytes / 1e6:.0f} MB beyond its base\n")
    return image
