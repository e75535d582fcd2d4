"""docs/two-machines.md: followed word for word, on two machines that are network namespaces."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.kvasir_command import wait_until
from tests.deploy.dockerfile import ROOT
from tests.machines import Machine, machines

PAGE = (ROOT / "docs/two-machines.md").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Step:
    """A block of the page: where it is to be used, its language, what it says."""

    place: str
    language: str
    text: str


def steps() -> list[Step]:
    found = []
    for section in PAGE.split("\n## ")[1:]:
        heading, _, rest = section.partition("\n")
        place = re.sub(r"^\d+\. ", "", heading).partition(":")[0]
        found += [Step(place, *block) for block in re.findall(r"```(\w+)\n(.*?)```", rest, re.S)]
    return found


class Shell:
    """The shell of somebody who is logged in, in the checkout. Ends with the first command that fails."""

    def __init__(self, machine: Machine, programs: Path) -> None:
        self.machine = machine
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RAY_", "KVASIR_", "REDIS_", "PYTEST_"))
        }
        self._process = subprocess.Popen(
            machine.command(["bash", "--norc", "-e"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**inherited, "PATH": f"{programs}:{os.environ['PATH']}"},
        )
        self.run("cd kvasir")

    def run(self, text: str) -> str:
        """What was said, by programs that go on as well, until the last command has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{text}\nprintf '\\n%s\\n' 'end of'' step'\n")
        self._process.stdin.flush()
        lines: list[str] = []
        for line in self._process.stdout:
            if line == "end of step\n":
                return "".join(lines)
            lines.append(line)
        pytest.fail(f"on {self.machine.address}:\n{text}\n{''.join(lines)}")

    def leave(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)


def lay_out_checkout(home: Path) -> None:
    """What `git clone` and the first `./kvasir` leave behind, as far as the page uses it."""
    (home / "kvasir").mkdir()
    (home / "kvasir" / ".venv").symlink_to(sys.prefix)
    command = home / "kvasir" / "kvasir"
    command.write_text('#!/bin/sh\nexec .venv/bin/python -P -m cluster.cli "$@"\n')
    command.chmod(0o755)


SSH = """#!/bin/sh
cd {folder} && shift && HOME=$PWD sh -c "$*"
"""
SCP = """#!/bin/sh
[ "$1" = -p ] && shift
cp -p "$1" {folder}/"${{2#*:}}"
"""


def lay_out_programs(folder: Path, other: Machine) -> Path:
    """ssh and scp, with which the other machine is a folder."""
    for name, text in (("ssh", SSH), ("scp", SCP)):
        (folder / name).write_text(text.format(folder=shlex.quote(str(other.folder))))
        (folder / name).chmod(0o755)
    return folder


@dataclass(frozen=True, slots=True)
class Followed:
    """What came of following the page: what was said in each step, and the machines."""

    said: list[tuple[Step, str]]
    machines: list[Machine]

    def said_after(self, start: str) -> str:
        (said,) = (said for step, said in self.said if start in step.text.partition("\n")[0])
        return said


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Followed]:
    with ExitStack() as stack:
        first, second = stack.enter_context(machines(tmp_path_factory.mktemp("machines"), 2))
        programs = lay_out_programs(tmp_path_factory.mktemp("bin"), second)
        shells = {}
        for place, machine in (("First machine", first), ("Second machine", second)):
            lay_out_checkout(machine.folder)
            shells[place] = Shell(machine, programs)
            stack.callback(shells[place].leave)
        shells["Anywhere that reaches it"] = shells["Second machine"]
        said = []
        for step in steps():
            if step.text.startswith("git clone"):
                continue
            if step.language == "yaml":
                (first.folder / "kvasir" / "fleet.yaml").write_text(step.text)
                continue
            places = ("First machine", "Second machine") if step.place == "Both machines" else (step.place,)
            said += [(step, shells[place].run(step.text)) for place in places]
        for shell in shells.values():
            shell.leave()
        yield Followed(said, [first, second])


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_fleet_over_two_machines_answers_whoever_follows_the_page(followed: Followed) -> None:
    fleet_said = followed.said_after("./kvasir fleet apply")
    assert "ready: toy 2\n" in fleet_said
    addresses = re.findall(r"^toy-\d +ready +\w+ +([\d.]+):\d+ ", fleet_said, re.M)
    assert len(addresses) == 2, fleet_said
    assert set(addresses) <= {machine.address for machine in followed.machines}
    asked = followed.said_after("curl").strip().splitlines()
    answer = json.loads(asked[-1][asked[-1].index('{"id"') :])
    assert answer["choices"][0]["message"]["content"], answer


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_its_last_sections_leave_no_process(followed: Followed) -> None:
    assert "The fleet is stopped." in followed.said_after('kill "$(cat router.pid)"')
    for machine in followed.machines:
        wait_until(lambda: not machine.processes(), lambda: str(machine.processes()))  # noqa: B023
