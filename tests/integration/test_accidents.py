"""What must hold when a process dies in mid-use. Real processes, killed for real."""

import itertools
import random
import threading
import time
from collections.abc import Iterator

import openai
import pytest

from loadtests.stacks.local_stack import LocalStack, local_stack
from tests.integration.observe import indexed_blocks, is_idle, metric, metrics, records, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SYSTEM = "You are a patient assistant who explains how caches work. " * 40


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    settings = {"engine": "simulated", "model_name": "toy", "num_blocks": 4096}
    with local_stack(num_replicas=2, replica_settings=settings) as running:
        yield running


def client_of(stack: LocalStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0, timeout=60)


def ask(stack: LocalStack, question: str, *, max_tokens: int = 16, seed: int = 7) -> tuple[str, str]:
    """The streamed answer and the replica that the router named first."""
    with client_of(stack) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="toy",
            messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            max_tokens=max_tokens,
            seed=seed,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        replica_id = raw.headers["x-kvasir-replica"]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in raw.parse() if chunk.choices)
    return text, replica_id


def test_a_replica_killed_in_mid_stream_changes_nothing_that_the_client_reads(stack: LocalStack) -> None:
    whole, _ = ask(stack, "What is a replica?", max_tokens=200)
    with client_of(stack) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="toy",
            messages=[
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": "What is a replica?"},
            ],
            max_tokens=200,
            seed=7,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        victim = raw.headers["x-kvasir-replica"]
        pieces = []
        for number, chunk in enumerate(raw.parse()):
            if number == 20:
                stack.kill(victim)
            if chunk.choices:
                pieces.append(chunk.choices[0].delta.content or "")
    assert "".join(pieces) == whole
    stack.start(victim)
    stack.wait_ready(2)
    wait_until(lambda: is_idle(stack), "everything given back")


def test_a_replica_that_comes_back_under_its_name_is_believed_nothing_of_old(stack: LocalStack) -> None:
    _, victim = ask(stack, "What is an epoch?")
    before = records(stack)[victim].epoch
    wait_until(lambda: bool(indexed_blocks(stack, victim, before)), "the blocks in the index")
    stack.kill(victim)
    text, other = ask(stack, "What is an epoch?")
    assert text
    assert other != victim
    stack.start(victim)
    wait_until(
        lambda: any(name == victim and record.epoch != before for name, record in records(stack).items()),
        "it is back, as a new one",
    )
    stack.wait_ready(2)
    # The new one deletes them, or if it took so long that nothing tells of the old one, they expire.
    wait_until(lambda: not indexed_blocks(stack, victim, before), "what the old one had is gone", seconds=120)
    # The other replica has the prefix now; the one that came back holds nothing and must not win.
    assert ask(stack, "What is a block?")[1] == other


def test_serving_goes_on_while_redis_is_gone_and_the_index_refills_by_itself(stack: LocalStack) -> None:
    _, holder = ask(stack, "Warm the cache.")
    wait_until(lambda: is_idle(stack), "the router has heard what is cached")
    epoch = records(stack)[holder].epoch
    known = indexed_blocks(stack, holder, epoch)
    assert known
    stack.kill("redis")
    for number in range(5):
        _, replica_id = ask(stack, f"Question {number} without Redis?")
        assert replica_id == holder
    # Nobody says that those blocks are stored, and no further decision drops what was predicted.
    wait_until(lambda: metric(stack, "router_index_predictions") == 0, "no prediction left on an idle router")
    stack.start("redis")
    stack.wait_redis()
    wait_until(lambda: len(records(stack)) == 2, "both replicas registered again")
    wait_until(lambda: known <= indexed_blocks(stack, holder, epoch), "the index written again")
    assert ask(stack, "And after?")[1] == holder


def test_a_router_killed_and_started_again_finds_every_prefix_where_it_was(stack: LocalStack) -> None:
    _, holder = ask(stack, "Before the router died?")
    wait_until(lambda: is_idle(stack), "the index has what was computed")
    stack.kill("router")
    stack.start("router")
    stack.wait_ready(2)
    wait_until(
        lambda: metric(stack, "router_index_resyncs_total") >= 2, "it has read what both replicas hold"
    )
    assert {ask(stack, f"After it came back, {number}?")[1] for number in range(3)} == {holder}


def test_a_storm_of_requests_vanishing_clients_and_one_kill_leaves_nothing_behind(stack: LocalStack) -> None:
    rng = random.Random(3)
    numbers = itertools.count()
    failures: list[str] = []

    def one_client(patience: float) -> None:
        with client_of(stack) as client:
            for _ in range(6):
                try:
                    stream = client.chat.completions.create(
                        model="toy",
                        messages=[{"role": "user", "content": f"{next(numbers)} " + SYSTEM}],
                        max_tokens=40,
                        n=2,
                        stream=True,
                    )
                    for seen, _ in enumerate(stream):
                        if seen > patience:
                            stream.close()
                            break
                except openai.APIError as error:
                    failures.append(repr(error))

    wait_until(lambda: is_idle(stack), "everything of before has ended and is counted")
    before = metrics(stack)
    threads = [threading.Thread(target=one_client, args=(rng.choice([1, 10, 1000]),)) for _ in range(12)]
    for thread in threads:
        thread.start()
    stack.kill("replica-1")
    stack.start("replica-1")
    for thread in threads:
        thread.join()
    stack.wait_ready(2)
    assert failures == []
    wait_until(lambda: is_idle(stack), "everything given back")
    told = metrics(stack) - before
    assert told["router_requests_total"] == told["router_tenant_requests_total"] == len(threads) * 6
    assert (
        told["router_request_errors_total"]
        == told["router_requests_total"] - told["router_e2e_seconds_count"]
    )
    assert told["router_prompt_tokens_by_origin_total"] == told["router_prompt_tokens_total"] > 0
    assert told["router_tenant_prompt_tokens_total"] == told["router_prompt_tokens_total"]
    assert told["router_tenant_ttft_seconds_count"] == told["router_ttft_seconds_count"]
    assert told["router_submits_total"] >= told["router_decisions_total"] >= told["router_ttft_seconds_count"]


def test_requests_of_seconds_without_any_replica_are_all_answered(stack: LocalStack) -> None:
    for name in ("replica-0", "replica-1"):
        stack.kill(name)
    answers: list[tuple[str, str]] = []
    threads = [
        threading.Thread(target=lambda number=number: answers.append(ask(stack, f"Is it back, {number}?")))
        for number in range(20)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: metric(stack, "router_waiting") == len(threads), "all of them wait in line")
    time.sleep(3)
    for name in ("replica-0", "replica-1"):
        stack.start(name)
    for thread in threads:
        thread.join()
    assert len(answers) == len(threads)
    stack.wait_ready(2)
    wait_until(lambda: is_idle(stack), "everything given back")
    assert metric(stack, "router_waiting") == metric(stack, "router_waiting_bytes") == 0
