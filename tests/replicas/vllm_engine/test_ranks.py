"""One replica, two ranks: a model that two processes share is served, and leaves no process behind."""

import random
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from loadtests.stacks.local_stack import LocalStack, local_stack

pytestmark = [pytest.mark.vllm, pytest.mark.cluster]

INDEX_SECONDS = 0.5
GONE_SECONDS = 20.0
REPLICA = "replica-0"
SETTINGS = {
    "engine": "vllm",
    "num_blocks": 100,
    "max_batched_tokens": 256,
    "max_running": 16,
    "engine_args": "tensor_parallel_size=2",
}


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with local_stack(num_replicas=1, replica_settings=SETTINGS) as running:
        yield running


def ask(stack: LocalStack, prompt: list[int], **more: object) -> httpx.Response:
    body = {"model": "toy_model", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **more}
    return httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60.0).raise_for_status()


def family(stack: LocalStack, replica: str = REPLICA) -> list[psutil.Process]:
    """The replica, its engine, and the ranks."""
    parent = psutil.Process(stack.pid(replica))
    return [parent, *parent.children(recursive=True)]


def ranks(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if "VLLM::Worker" in " ".join(each.cmdline())]


def exit_status(stack: LocalStack, replica: str, processes: list[psutil.Process]) -> int | None:
    """Of the replica, once all its processes are gone."""
    deadline = time.monotonic() + GONE_SECONDS
    while stack.exit_status(replica) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    _, alive = psutil.wait_procs(processes[1:], deadline - time.monotonic())
    assert not alive, [each.cmdline() for each in alive]
    return stack.exit_status(replica)


def test_it_serves_and_a_hit_is_foretold(stack: LocalStack) -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(10, 1000) for _ in range(600)]  # more than a step
    answers = []
    for _ in range(2):
        answers.append(ask(stack, prompt, temperature=1.0, seed=1))
        time.sleep(INDEX_SECONDS)
    cached = [each.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
    foretold = [int(each.headers["x-kvasir-overlap-tokens"]) for each in answers]
    assert foretold == cached == [0, 576]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]
    assert len(ask(stack, prompt, logprobs=2).json()["choices"][0]["logprobs"]["tokens"]) == 8


def test_a_drain_leaves_no_process(stack: LocalStack) -> None:
    drain(stack, REPLICA)


def drain(stack: LocalStack, replica: str) -> None:
    processes = family(stack, replica)
    assert len(ranks(processes)) == 2
    processes[0].terminate()
    assert exit_status(stack, replica, processes) == 0


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_replica_and_the_others(stack: LocalStack) -> None:
    start(stack)
    lose_a_rank(stack, REPLICA)


def lose_a_rank(stack: LocalStack, replica: str) -> None:
    processes = family(stack, replica)
    ranks(processes)[1].kill()
    assert exit_status(stack, replica, processes) == 1


@pytest.mark.slow
def test_a_killed_replica_leaves_no_process(stack: LocalStack) -> None:
    start(stack)
    kill(stack, REPLICA)


def kill(stack: LocalStack, replica: str) -> None:
    processes = family(stack, replica)
    processes[0].kill()
    assert exit_status(stack, replica, processes) == -9


def start(stack: LocalStack) -> None:
    if stack.exit_status(REPLICA) is not None:
        stack.start(REPLICA)
    stack.wait_ready(1)
