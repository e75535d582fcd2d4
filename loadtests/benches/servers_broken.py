"""Faults of the bench `servers`: two vLLM servers are broken in turn, while clients compare every answer.

Owns the faults and the load beneath them. After each fault the load pauses: then the index must be equal to
what the servers hold, block by block, and nothing that counts work may be left above zero.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import httpx
import psutil

from loadtests.benches.harness import CHAT, counters
from loadtests.benches.servers_compared import AT_ONCE, Body, at_once, mixed_bodies, read_answer
from loadtests.benches.servers_held import Held, print_index
from loadtests.benches.soak_figures import raised_gauges
from loadtests.stacks.local_stack import LocalStack

LOAD_SECONDS, DOWN_SECONDS = 10.0, 5.0
STILL_SECONDS, HUNG_SECONDS = 10.0, 40.0
"""Less and more than a server may take to answer (`engine_hang_seconds`)."""
START_SECONDS = 400.0


class Load:
    """Greedy chats, `AT_ONCE` at a time, each compared with the text that a server itself gives."""

    def __init__(self, url: str, bodies: Sequence[Body]) -> None:
        self._url, self._bodies = url, bodies
        self._goes = asyncio.Event()
        self._num_open = 0
        self._texts: dict[int, list[str]] = {}
        self.counted: Counter[str] = Counter()

    async def take_texts(self, server_url: str) -> None:
        async with httpx.AsyncClient(timeout=300) as client:

            async def direct(at: int, body: Body) -> None:
                self._texts[at] = read_answer(await client.post(server_url + CHAT, json=body))[0]

            await at_once(self._bodies, 2, direct)

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=300) as client, asyncio.TaskGroup() as group:
            for number in range(AT_ONCE):
                group.create_task(self._ask_on(client, random.Random(number)))

    async def _ask_on(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        while True:
            await self._goes.wait()
            at = rng.randrange(len(self._bodies))
            self._num_open += 1
            try:
                answer = await client.post(self._url + CHAT, json=self._bodies[at])
                found = read_answer(answer)[0]
            except (httpx.HTTPError, ValueError, TypeError, KeyError) as error:
                self.counted["errors"] += 1
                print(f"  error of {at}: {error!r}"[:300], flush=True)
                continue
            finally:
                self._num_open -= 1
            self.counted["right" if found == self._texts[at] else "wrong"] += 1
            if found != self._texts[at]:
                replica = answer.headers.get("x-kvasir-replica")
                print(f"  wrong text of {at} ({replica}): {found!r}, not {self._texts[at]!r}", flush=True)

    def go(self) -> None:
        self._goes.set()

    async def pause(self) -> None:
        """Return when every request that was sent is answered."""
        self._goes.clear()
        while self._num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


class Breaker:
    """Does the faults, and starts replicas that have ended again, as a supervisor does."""

    def __init__(self, own: LocalStack, servers: LocalStack, held: Sequence[Held]) -> None:
        self._own, self._servers, self._held = own, servers, held

    async def supervise(self) -> None:
        while True:
            for number in range(len(self._held)):
                if self._own.exit_status(f"replica-{number}") is not None:
                    self._own.start(f"replica-{number}")
            await asyncio.sleep(0.5)

    def _all_of(self, number: int) -> list[psutil.Process]:
        process = psutil.Process(self._servers.pid(f"vllm-{number}"))
        return [*process.children(recursive=True), process]

    async def _is_served_by(self, num_replicas: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        async with httpx.AsyncClient(timeout=30) as client:
            while (await client.get(f"{self._own.url}/ready")).json()["num_replicas"] != num_replicas:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not {num_replicas} replicas\n{self._own.logs()}")
                await asyncio.sleep(0.1)

    async def kill(self) -> None:
        for each in self._all_of(0):
            each.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self._servers.kill, "vllm-0")
        self._held[0].died()
        await self._is_served_by(1)
        await asyncio.sleep(DOWN_SECONDS)

    async def start(self) -> None:
        self._servers.start("vllm-0")
        await self._is_served_by(2)
        await asyncio.sleep(LOAD_SECONDS)

    async def restart(self) -> None:
        os.kill(self._servers.pid("vllm-0"), signal.SIGTERM)
        while self._servers.exit_status("vllm-0") is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        self._held[0].died()
        await self.start()

    async def stand_still(self, seconds: float) -> None:
        stopped = self._all_of(1)
        for each in stopped:
            each.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        for each in stopped:
            each.send_signal(signal.SIGCONT)
        await asyncio.sleep(LOAD_SECONDS)
        await self._is_served_by(2)


def moved(own: LocalStack) -> Counter[str]:
    """How many attempts the router has made again: before a first token, and after it."""
    kinds = ("retries", "resumes")
    return Counter({kind: counters([own.url], f"router_{kind}_total").total() for kind in kinds})


def raised(own: LocalStack, replica_metrics: Sequence[str]) -> set[str]:
    """Gauges that count work; a replica that waits for its server has none."""
    found = set()
    for url in (own.url, *replica_metrics):
        try:
            found |= {*raised_gauges(httpx.get(f"{url}/metrics", timeout=30).text)}
        except httpx.ConnectError:
            continue
    return found


async def faults(
    own: LocalStack,
    servers: LocalStack,
    url: str,
    held: Sequence[Held],
    replica_metrics: Sequence[str],
    number: int,
) -> None:
    load = Load(own.url, list(mixed_bodies("faults", number, is_greedy=True)))
    breaker = Breaker(own, servers, held)
    in_turn: dict[str, Callable[[], Awaitable[None]]] = {
        "in calm": lambda: asyncio.sleep(LOAD_SECONDS),
        "killed": breaker.kill,
        "started again": breaker.start,
        f"the other still for {STILL_SECONDS:g} s": lambda: breaker.stand_still(STILL_SECONDS),
        "SIGTERM, and started again": breaker.restart,
        f"the other still for {HUNG_SECONDS:g} s": lambda: breaker.stand_still(HUNG_SECONDS),
    }
    at_rest: set[str] | None = None
    await load.take_texts(url)
    tasks = [asyncio.create_task(load.run()), asyncio.create_task(breaker.supervise())]
    for name, fault in in_turn.items():
        before, began = load.counted + moved(own), time.monotonic()
        load.go()
        await fault()
        await load.pause()
        counted = load.counted + moved(own) - before
        print(f"faults, {name}: {dict(counted)} in {time.monotonic() - began:.0f} s")
        await asyncio.to_thread(print_index, own, held)
        now = await asyncio.to_thread(raised, own, replica_metrics)
        at_rest = now if at_rest is None else at_rest
        print(f"  left raised: {', '.join(sorted(now - at_rest)) or 'nothing'}", flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    print(f"faults: {dict(load.counted + moved(own))}", flush=True)
