"""A router that is busy itself: one tenant asks on many connections at once, and another one now and then.

The replicas' engines are simulated and take no time, so that the router is what everybody waits for. The
other tenant asks in a process of its own, first alone and then beside the flood.

    python -m loadtests.benches.busy_router [--connections 60] [--rounds 3]
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx

from loadtests.figures import milliseconds, print_header
from loadtests.stacks.key_file import write_key_file
from loadtests.stacks.local_stack import local_stack
from router.tenants.caller import Tenant

REPLICA = {"engine": "simulated", "simulated_hardware": "instant", "model_name": "toy", "num_blocks": 65_536}
WORDS = ("river", "stone", "lamp", "seven", "garden", "quiet", "engine", "paper")
NUM_WORDS = 1000
NUM_PROMPTS = 5000
NUM_QUESTIONS = 30
PAUSE_SECONDS = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--connections", type=int, default=60, help="of the flood (default: 60)")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print_header("busy router")
    with tempfile.TemporaryDirectory(prefix="kvasir-keys-") as folder:
        file = Path(folder) / "keys.json"
        keys = write_key_file(file, [Tenant(name="flood"), Tenant(name="other")])
        with local_stack(
            num_replicas=2, replica_settings=REPLICA, router_settings={"keys_file": file}
        ) as stack:
            for number in range(arguments.rounds):
                calm = asyncio.run(questions(stack.url, keys["other"]))
                with multiprocessing.get_context("spawn").Manager() as manager:
                    num_answers, is_over = manager.Value("i", 0), manager.Event()
                    process = multiprocessing.get_context("spawn").Process(
                        target=flood,
                        args=(stack.url, keys["flood"], arguments.connections, num_answers, is_over),
                    )
                    process.start()
                    while not num_answers.value and process.is_alive():
                        time.sleep(0.1)
                    began, before = time.perf_counter(), num_answers.value
                    busy = asyncio.run(questions(stack.url, keys["other"]))
                    pace = (num_answers.value - before) / (time.perf_counter() - began)
                    is_over.set()
                    process.join()
                print(f"round {number + 1}, flood of {pace:.0f} answers/s\n  alone  {milliseconds(calm)}")
                print(f"  beside {milliseconds(busy)}")


async def questions(url: str, key: str) -> list[float]:
    """Seconds to whole answers of one token."""
    took = []
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for number in range(NUM_QUESTIONS):
            began = time.perf_counter()
            await ask(client, key, "The rules of this house are many. " * 100 + str(number))
            took.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_SECONDS)
    return took


async def ask(client: httpx.AsyncClient, key: str, text: str) -> None:
    body = {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    answer = await client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
    answer.raise_for_status()


def flood(url: str, key: str, num_connections: int, num_answers: Any, is_over: Any) -> None:
    """Prompts of which none begins like another, each connection's when the one before is answered."""
    asyncio.run(_flood(urlsplit(url), key, num_connections, num_answers, is_over))


async def _flood(
    address: SplitResult, key: str, num_connections: int, num_answers: Any, is_over: Any
) -> None:
    """Bytes that were made before, and no HTTP client, which would take longer than the router."""
    rng = random.Random(1)
    requests = [_request(address, key, " ".join(rng.choices(WORDS, k=NUM_WORDS))) for _ in range(NUM_PROMPTS)]
    count, stopped = 0, False

    async def one() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        while not stopped:
            writer.write(requests[count % NUM_PROMPTS])
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(head.decode())
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
            count += 1
        writer.close()
        await writer.wait_closed()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_connections):
            tasks.create_task(one())
        while not await asyncio.to_thread(is_over.wait, 0.2):
            num_answers.value = count
        stopped = True


def _request(address: SplitResult, key: str, text: str) -> bytes:
    body = json.dumps({"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 1})
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode("ascii")


if __name__ == "__main__":
    main()
