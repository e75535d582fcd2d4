"""Images built and run with buildah, without a daemon and without namespaces (chroot isolation).

Owns where buildah keeps them: a folder that goes when the tests end, so that nothing of this machine's own
images is seen or changed. Does not know what is in them.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.dockerfile import ROOT
from tests.tools import need_root, needed_tool

BASE = "localhost/kvasir-base:bookworm"
MOUNTS = Path("/proc/self/mountinfo")


@contextlib.contextmanager
def image_store() -> Iterator["ImageStore"]:
    """Skips, saying why, where no image can be built."""
    need_root("builds images without a daemon")
    for tool in ("buildah", "mmdebstrap"):
        needed_tool(tool)
    folder = Path(tempfile.mkdtemp(prefix="kvasir-images-"))
    folder.chmod(0o755)  # mmdebstrap fetches packages as a user of its own
    (folder / "scratch").mkdir()
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/images"\nrunroot = "{folder}/run"\n'
    )
    try:
        yield ImageStore(folder)
    finally:
        remove(folder)


def remove(folder: Path) -> None:
    """The folder, and what buildah has left mounted in it: first, since what is mounted is not ours."""
    for mount in reversed(mounts_below(folder)):
        subprocess.run(["umount", mount], check=True)
    assert mounts_below(folder) == []
    shutil.rmtree(folder)


def mounts_below(folder: Path) -> list[str]:
    """In the order of mounting."""
    mounts = [line.split()[4] for line in MOUNTS.read_text(encoding="utf-8").splitlines()]
    return [mount for mount in mounts if Path(mount).is_relative_to(folder)]


@dataclass(frozen=True, slots=True)
class ImageStore:
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "BUILDAH_ISOLATION": "chroot",
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "TMPDIR": str(self.folder / "scratch"),
        }

    def run(self, *command: str | Path) -> str:
        done = subprocess.run(
            command, env=self.environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def base(self) -> "Image":
        """The image that deploy/images/make-debian-base makes, made if it is not there yet."""
        if BASE not in self.run("buildah", "images", "--format", "{{.Name}}:{{.Tag}}").splitlines():
            self.run(ROOT / "deploy/images/make-debian-base", BASE)
        return Image(self, BASE)

    def build(self, kind: str, *options: str, dockerfile: Path | None = None) -> "Image":
        """deploy/images/KIND.Dockerfile on the local base. Docker's format: the other one has no health
        check."""
        base = self.base()
        image = Image(self, f"localhost/kvasir-test-{kind}")
        file = dockerfile or ROOT / f"deploy/images/{kind}.Dockerfile"
        self.run(
            *("buildah", "bud", "--format", "docker", "--build-arg", f"BASE={base.name}", *options),
            *("--file", file, "--tag", image.name, "."),
        )
        sys.stdout.write(f"{kind} image: {(image.num_bytes - base.num_bytes) / 1e6:.0f} MB beyond its base\n")
        return image


@dataclass(frozen=True, slots=True)
class Image:
    store: ImageStore
    name: str

    @property
    def config(self) -> dict[str, Any]:
        """User, environment, entrypoint, health check, as the image itself says."""
        config: dict[str, Any] = self._inspect()["Docker"]["config"]
        return config

    @property
    def num_bytes(self) -> int:
        """Of all layers, uncompressed."""
        return sum(layer["size"] for layer in json.loads(self._inspect()["Manifest"])["layers"])

    def _inspect(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.store.run("buildah", "inspect", "--type", "image", self.name))
        return found

    @contextlib.contextmanager
    def container(self) -> Iterator["Container"]:
        """Its files, to run programs in; they share this machine's network."""
        name = self.store.run("buildah", "from", self.name)
        try:
            yield Container(self, name)
        finally:
            self.store.run("buildah", "rm", name)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        """A copy of its files; what is written there is gone afterwards."""
        with self.container() as container:
            yield Path(self.store.run("buildah", "mount", container.name))

    @contextlib.contextmanager
    def running(self, environment: Mapping[str, str]) -> Iterator["Container"]:
        """Its entrypoint as its user."""
        with self.container() as files:
            container = Container(self, files.name, environment)
            with container.started(*self.config["Entrypoint"]):
                yield container


@dataclass(frozen=True, slots=True)
class Container:
    image: Image
    name: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, *words: str) -> list[str]:
        variables = [word for pair in self.environment.items() for word in ("--env", "=".join(pair))]
        user = self.image.config["User"]
        return ["buildah", "run", "--user", user, *variables, self.name, "--", *words]

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.command(*words),
            env=self.image.store.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    @contextlib.contextmanager
    def started(self, *words: str) -> Iterator[None]:
        process = subprocess.Popen(
            self.command(*words), env=self.image.store.environment, start_new_session=True
        )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def is_healthy(self) -> bool:
        """What the image's own health check says."""
        kind, *words = self.image.config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.run(*words).returncode == 0
