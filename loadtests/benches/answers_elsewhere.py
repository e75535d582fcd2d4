"""What a conversation's next turn costs where another router has answered the ones before.

Measured are the router's processor time and the client's wait, for conversations of some length.
One router answers all turns but the last, which comes to each of three: one that looks for the earlier
answers in Redis, one that has none to look for (`all_history_bytes` of 0), and the one that has answered
them. Who goes first goes round. The replica is simulated, with a cache that holds everything. At the end a
burst of many conversations at once comes to a router that knows none of them, and is busier than Redis.

    python -m loadtests.benches.answers_elsewhere
"""

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadtests.figures import print_header
from loadtests.stacks.local_stack import LocalStack, free_port, local_stack, python_command

MODEL = "toy"
SYSTEM = "You are a patient assistant who explains how caches work, at some length. " * 20
ANSWER_TOKENS = 300
TICK_SECONDS = 0.01
SETTLE_SECONDS = 1.0
AT_ONCE = 64

REPLICA = {"engine": "simulated", "simulated_hardware": "instant", "num_blocks": 262_144, "model_name": MODEL}
OTHERS: dict[str, dict[str, object]] = {"looks in Redis": {}, "cannot look": {"all_history_bytes": 0}}
KNOWS = "has answered itself"


def start(stack: LocalStack, name: str, settings: dict[str, object]) -> str:
    port = free_port()
    stack.start(name, python_command("router", {"port": port, **stack.shared, **settings}))
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/ready").status_code == 200
        return False

    stack.poll(ready, name)
    return url


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_SECONDS


def ask(client: httpx.Client, url: str, messages: list[dict[str, Any]], num_tokens: int) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "max_tokens": num_tokens, "temperature": 1.0}
    answer = client.post(f"{url}/v1/chat/completions", json=body)
    answer.raise_for_status()
    content: dict[str, Any] = answer.json()
    return content


def conversations(
    client: httpx.Client, url: str, number: int, num_turns: int, word: str
) -> Iterator[list[dict[str, Any]]]:
    for each in range(number):
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        for turn in range(num_turns):
            question = f"{word} {each}, question {turn}: what is a block?"
            messages.append({"role": "user", "content": question})
            answer = ask(client, url, messages, ANSWER_TOKENS)
            messages.append(answer["choices"][0]["message"])
        messages.append({"role": "user", "content": "And what comes of it?"})
        yield messages


def compare(
    stack: LocalStack, urls: dict[str, tuple[str, str]], num_turns: int, rounds: int, size: int
) -> None:
    cpu: dict[str, list[float]] = {name: [] for name in urls}
    waits: dict[str, list[float]] = {name: [] for name in urls}
    cached: dict[str, list[float]] = {name: [] for name in urls}
    with httpx.Client(timeout=120) as client:
        for number in range(rounds):
            word = f"Of {num_turns} turns, round {number}"
            talks = list(conversations(client, stack.url, size, num_turns, word))
            time.sleep(SETTLE_SECONDS)
            order = [*urls][number % len(urls) :] + [*urls][: number % len(urls)]
            for name in order:
                process, url = urls[name]
                before = cpu_seconds(stack.pid(process))
                for talk in talks:
                    began = time.monotonic()
                    usage = ask(client, url, talk, 1)["usage"]
                    waits[name].append(time.monotonic() - began)
                    cached[name].append(
                        usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
                    )
                cpu[name].append((cpu_seconds(stack.pid(process)) - before) / size)
    for name in urls:
        print(
            f"| {num_turns} | {name} | {1e3 * statistics.median(cpu[name]):.2f} "
            f"| {1e3 * statistics.median(waits[name]):.1f} | {1e3 * _high(waits[name]):.1f} "
            f"| {statistics.mean(cached[name]):.3f} |",
            flush=True,
        )


async def burst(url: str, talks: list[list[dict[str, Any]]]) -> list[float]:
    waits: list[float] = []
    talking = iter(talks)

    async def talk_on(client: httpx.AsyncClient) -> None:
        for messages in talking:
            began = time.monotonic()
            body = {"model": MODEL, "messages": messages, "max_tokens": 1}
            (await client.post(f"{url}/v1/chat/completions", json=body)).raise_for_status()
            waits.append(time.monotonic() - began)

    async with httpx.AsyncClient(timeout=120) as client, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(talk_on(client))
    return waits


def measure_burst(stack: LocalStack, number: int) -> None:
    url = start(stack, "burst", {})
    with httpx.Client(timeout=120) as client:
        talks = list(conversations(client, stack.url, number, 3, "Of a burst"))
    waits = asyncio.run(burst(url, talks))
    print(f"\n{number} conversations of 3 answers, {AT_ONCE} at a time: answer p50 ", end="")
    print(f"{1e3 * statistics.median(waits):.0f} ms, p90 {1e3 * _high(waits):.0f} ms; looks by outcome:")
    for family in text_string_to_metric_families(httpx.get(url + "/metrics").text):
        for sample in family.samples:
            if sample.name == "router_history_lookups_total" and sample.value:
                print(f"- {sample.labels['outcome']}: {sample.value:.0f}")


def _high(values: list[float]) -> float:
    return sorted(values)[int(0.9 * (len(values) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 5, 20], help="before the last one")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--conversations", type=int, default=25, help="in a round")
    parser.add_argument("--burst", type=int, default=300, help="conversations")
    arguments = parser.parse_args()
    print_header("Answers of another router")
    print("| earlier answers | the router | CPU, ms a request | answer p50, ms | p90 | cached |")
    print("|---|---|---|---|---|---|")
    with local_stack(replica_settings=REPLICA) as stack:
        urls = {name: (name, start(stack, name, settings)) for name, settings in OTHERS.items()}
        urls[KNOWS] = ("router", stack.url)
        for num_turns in arguments.turns:
            compare(stack, urls, num_turns, arguments.rounds, arguments.conversations)
        measure_burst(stack, arguments.burst)


if __name__ == "__main__":
    main()
