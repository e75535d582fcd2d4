"""What must hold when a process neither works nor dies. Real processes, stopped for real."""

import os
import signal
from collections.abc import Callable, Iterator

import openai
import psutil
import pytest

from loadtests.stacks.local_stack import LocalStack, local_stack
from tests.integration.observe import is_idle, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

QUESTION = "Count as far as you can. " * 20


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    settings = {
        **{"engine": "simulated", "model_name": "toy", "num_blocks": 4096, "max_batched_tokens": 512},
        **{"engine_process": "true", "engine_hang_seconds": 2},
    }
    with local_stack(num_replicas=2, replica_settings=settings) as running:
        yield running


def streamed(stack: LocalStack, at_the_20th: Callable[[str], None] = lambda replica_id: None) -> str:
    """The answer; `at_the_20th` piece something befalls the replica that it comes from."""
    url = stack.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="toy",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=100,
            seed=7,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        pieces = []
        for number, chunk in enumerate(raw.parse()):
            if number == 20:
                at_the_20th(raw.headers["x-kvasir-replica"])
            if chunk.choices:
                pieces.append(chunk.choices[0].delta.content or "")
    return "".join(pieces)


def test_an_engine_that_hangs_in_mid_stream_changes_nothing_that_the_client_reads(stack: LocalStack) -> None:
    whole, victims = streamed(stack), []

    def hang_engine(replica_id: str) -> None:
        (engine,) = psutil.Process(stack.pid(replica_id)).children()
        engine.suspend()
        victims.append(replica_id)

    assert streamed(stack, hang_engine) == whole
    (victim,) = victims
    wait_until(lambda: stack.exit_status(victim) is not None, "the replica has ended")
    assert stack.exit_status(victim) == 1
    stack.start(victim)
    stack.wait_ready(2)
    wait_until(lambda: is_idle(stack), "everything given back")


def test_a_frozen_replica_changes_nothing_that_the_client_reads_and_comes_back(stack: LocalStack) -> None:
    whole, victims = streamed(stack), []

    def freeze(replica_id: str) -> None:
        os.kill(stack.pid(replica_id), signal.SIGSTOP)
        victims.append(replica_id)

    assert streamed(stack, freeze) == whole
    stack.wait_ready(1)
    os.kill(stack.pid(victims[0]), signal.SIGCONT)
    stack.wait_ready(2)
    wait_until(lambda: is_idle(stack), "everything given back")
    assert streamed(stack) == whole
