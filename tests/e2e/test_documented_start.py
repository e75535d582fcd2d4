"""The commands of README's start and of docs/one-machine.md, as they stand there, in a fresh clone.

The clone, of the last commit, makes its own environment: it has what the first `./kvasir up` installs and
nothing else. The commands run in a network of their own, so ports are as documented and `up` asks nothing
of the world.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.test_docs import FENCE, ROOT, text_of
from tests.tools import need_root, needed_tool, not_here

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1500)]

PAGE = "docs/one-machine.md"
START_SECONDS = 300.0
INSTALL_SECONDS = 900.0
ELSEWHERE = "/tmp/another-cluster"


@dataclass(frozen=True)
class Clone:
    folder: Path
    network: int
    """The process whose network it has."""
    environment: dict[str, str]

    def words(self, line: str) -> list[str]:
        """The command that runs `line` in a shell, in the clone and in its network."""
        line = line.replace(ELSEWHERE, str(self.folder.parent / "another"))
        return ["nsenter", f"--net=/proc/{self.network}/ns/net", "bash", "-c", f"cd {self.folder} && {line}"]

    def run(self, line: str, stdin: str = "") -> str:
        """What it says. It has to succeed."""
        done = subprocess.run(
            self.words(line),
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=START_SECONDS,
            env=self.environment,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def up(self, line: str) -> Iterator[Path]:
        """A cluster while the context lasts, and its log. `./kvasir down` of the same directory ends it."""
        log = self.folder.parent / f"{time.monotonic_ns()}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                self.words(f"exec {line}"), stdout=file, stderr=file, env=self.environment
            )
        try:
            deadline = time.monotonic() + START_SECONDS
            while "Ctrl-C ends all of it." not in log.read_text():
                assert process.poll() is None and time.monotonic() < deadline, f"{line}\n{log.read_text()}"
                time.sleep(0.1)
            yield log
            directory = re.findall(r"--run-dir \S+", line)
            self.run(" ".join(["./kvasir down", *directory]))
            assert process.wait(60) == 0, log.read_text()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(120)


def commands_under(page: str, heading: str) -> list[str]:
    """The lines of the blocks for a shell in that section, with what a backslash continues."""
    sections = re.split(r"^#+ ", text_of(page), flags=re.MULTILINE)
    (section,) = [each for each in sections if each.startswith(f"{heading}\n")]
    blocks = [block for language, block in FENCE.findall(section) if language in ("", "sh", "bash")]
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    need_root("can make network namespaces")
    needed_tool("ip")
    folder = tmp_path_factory.mktemp("start")
    line = commands_under("README.md", "Start")[0].replace("<this repository>", shlex.quote(str(ROOT)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVASIR_")}
    done = subprocess.run(
        ["bash", "-c", f"{line} && ./kvasir --help"],
        **{"cwd": folder, "env": environment, "timeout": INSTALL_SECONDS},
        **{"capture_output": True, "text": True, "check": False},
    )
    assert done.returncode == 0, done.stderr
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    script = "ip link set lo up && echo made && read"
    with subprocess.Popen(["unshare", "--net", "bash", "-c", script], text=True, **pipes) as network:
        assert network.stdout is not None
        if network.stdout.readline() != "made\n":
            not_here("this machine makes no network namespaces")
        yield Clone(folder / "kvasir", network.pid, environment)


def test_the_start_in_the_readme_answers_curl_and_chats(clone: Clone) -> None:
    _, up, curl, chat, with_a_real_model = commands_under("README.md", "Start")
    assert with_a_real_model.startswith("./kvasir up --model /models/")  # which this machine does not have
    with clone.up(up):
        answer = json.loads(clone.run(f"{curl} --silent --show-error"))
        assert answer["choices"][0]["message"]["content"]
        assert " cached" in clone.run(chat, stdin="What is a KV cache?\n")


def test_the_commands_for_a_cluster_that_runs(clone: Clone) -> None:
    cloned, up, chat, status, status_as_json, down = commands_under(PAGE, "One machine")
    assert [cloned, up] == commands_under("README.md", "Start")[:2]
    assert down.split()[:2] == ["./kvasir", "down"]  # clone.up() ends with it
    ((program,),) = [[block] for language, block in FENCE.findall(text_of(PAGE)) if language == "python"]
    with clone.up(up):
        assert " cached" in clone.run(chat, stdin="What is a KV cache?\n")
        assert "replica-0" in clone.run(status)
        assert json.loads(clone.run(status_as_json))["replicas"]
        program = program.replace("…1,500 tokens that all users share…", "Answer in plain words. " * 300)
        asked = [clone.run(shlex.join([sys.executable, "-P", "-c", program])).splitlines() for _ in range(2)]
        assert int(asked[0][-1]) == 0 < 1000 < int(asked[1][-1])


def test_several_replicas_and_routers_and_a_cluster_beside_them(clone: Clone) -> None:
    first, second = commands_under(PAGE, "More than two replicas, or another port")
    ask = commands_under("README.md", "Start")[2] + " --silent --show-error --fail"
    with clone.up(first), clone.up(second):
        for line in (ask, ask.replace(":8000/", ":8100/")):
            assert json.loads(clone.run(line))["choices"]
        assert "replica-3" in clone.run("./kvasir status")


def test_memory_below_the_device(clone: Clone) -> None:
    (up,) = commands_under(PAGE, "KV that lasts")
    with clone.up(up) as log:
        assert "256 MiB of memory and 2 GiB of disk" in log.read_text()
        assert json.loads(clone.run(commands_under("README.md", "Start")[2] + " --silent --fail"))["choices"]
    with clone.up(up):
        assert "replica-0" in clone.run("./kvasir status")


def test_every_command_of_the_page_is_run_here() -> None:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(PAGE)), flags=re.MULTILINE)
    with_commands = [heading for heading in headings if commands_under(PAGE, heading)]
    assert with_commands == ["One machine", "More than two replicas, or another port", "KV that lasts"]
