"""Machines on one machine: Linux namespaces with a network between them, for tests that run as root.

Each has an address, processes, a home directory and a /tmp/ray of its own; files are shared otherwise. All
of it hangs on a pipe to whoever made it: when that closes, the kernel ends everything on the machines, so
even a test run that is killed leaves nothing behind. Nothing has a name or an address outside, so nothing
can collide. Does not know what runs there.
"""

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tests.tools import need_root, needed_tool, not_here

_CLONE_NEWNET = 0x40000000

_SWITCH = """
ip link set lo up
ip link add switch type bridge
ip link set switch up
echo made
read
"""

_MACHINE = """
set -e
mkdir -p /tmp/ray
mount --bind "$1" /tmp/ray
mount --bind "$2" "$3"
mount --bind /dev/null /etc/resolv.conf
echo made
read
"""
"""As process 1 of its machine, bash also takes leave of processes whose parent has gone. Whoever asks for a
name that /etc/hosts does not have hears at once that nobody knows it, instead of waiting for an answer."""


class Machine:
    """One machine. `home` is the home directory as seen there, `folder` where it lies otherwise."""

    def __init__(self, number: int, folder: Path, home: Path, switch: int) -> None:
        self.address = f"10.0.0.{number}"
        self.folder = folder / f"home-{number}"
        self.ray_folder = folder / f"ray-{number}"
        self.home = home
        self._port = f"port{number}"
        self._switch = switch
        self._started: list[subprocess.Popen[bytes]] = []
        self.folder.mkdir()
        self.ray_folder.mkdir()
        words = [*("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")]
        words += ["bash", "-c", _MACHINE, "bash", str(self.ray_folder), str(self.folder), str(home)]
        self._process = _begin(words)
        self._pid = self._process.pid

    def plug_in(self) -> None:
        """Connect it to the switch. A default route, as machines have: Ray asks for one."""
        _ip(self._switch, f"link add {self._port} type veth peer name eth0 netns {self._pid}")
        _ip(self._pid, "link set lo up")
        _ip(self._pid, f"address add {self.address}/24 dev eth0")
        _ip(self._pid, "link set eth0 up")
        _ip(self._pid, "route add default dev eth0")
        _ip(self._switch, f"link set {self._port} up")
        self.heal()

    def cut_off(self) -> None:
        """From now on nothing comes through to the others or from them, and nobody is told."""
        _ip(self._switch, f"link set {self._port} nomaster")

    def heal(self) -> None:
        _ip(self._switch, f"link set {self._port} master switch")

    def command(self, words: list[str]) -> list[str]:
        """The command that runs `words` there, in the home directory."""
        process = f"/proc/{self._pid}"
        entering = ["nsenter", f"--net={process}/ns/net", f"--mount={process}/ns/mnt"]
        entering += [f"--pid={process}/ns/pid_for_children"]
        return [*entering, "env", f"--chdir={self.home}", f"HOME={self.home}", *words]

    def run(self, *words: str, timeout: float = 120.0, **options: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.command(list(words)), capture_output=True, text=True, check=False, timeout=timeout, **options
        )

    def start(self, *words: str, log: IO[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        """Something that goes on. It ends with the machine at the latest."""
        process = subprocess.Popen(
            self.command(list(words)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )
        self._started.append(process)
        return process

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Within, what this thread opens in the network it opens from there."""
        with open("/proc/thread-self/ns/net") as before, open(f"/proc/{self._pid}/ns/net") as here:
            _enter(here.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def processes(self) -> dict[int, str]:
        """What runs there: process ids as this machine has them, and command lines."""
        own = os.readlink(f"/proc/{self._pid}/ns/pid_for_children")
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns/pid") == own and not _is_first(entry):
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    if line:  # else it has ended, and nobody has taken notice yet
                        found[int(entry.name)] = line
        return found

    def destroy(self) -> None:
        """The power goes: everything there ends at once."""
        _end(self._process)
        for process in self._started:
            process.wait(30)


@contextlib.contextmanager
def machines(folder: Path, count: int) -> Iterator[list[Machine]]:
    """They can reach each other and nobody else. `folder` keeps their files."""
    need_root("can make network namespaces")
    needed_tool("ip")
    home = folder / "home"
    home.mkdir()
    with contextlib.ExitStack() as stack:
        switch = _begin(["unshare", "--net", "bash", "-c", _SWITCH])
        stack.callback(_end, switch)
        made = []
        for number in range(1, count + 1):
            made.append(Machine(number, folder, home, switch.pid))
            stack.callback(made[-1].destroy)
            made[-1].plug_in()
        yield made


def _begin(words: list[str]) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    if said != "made\n":
        _end(process)
        not_here(f"this machine makes no namespaces: {said.strip()}")
    return process


def _end(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


def _ip(pid: int, arguments: str) -> None:
    """`ip`, in the network of that process."""
    words = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", *arguments.split()]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {arguments}: {done.stderr}"


def _enter(network: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(network, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _is_first(entry: Path) -> bool:
    """Whether it is process 1 of its machine."""
    status = (entry / "status").read_text()
    numbers = next(line for line in status.splitlines() if line.startswith("NSpid:"))
    return numbers.split()[-1] == "1"
