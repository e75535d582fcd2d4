"""Some half a minute in the life of a cluster in which as much happens as can: hits of all kinds, evictions,
preemptions, refusals, clients who leave, clients who are wrong, a replica that dies, a Redis that
stops.

Owns what is sent and what is broken. Does not know metrics.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator

import httpx
import redis

from cluster.local.run_directory import ClusterState, ReplicaEntry, RunDirectory
from tests.integration.observe import wait_until

MODEL = "toy_model"
SYSTEM_LINES = 60
NUM_CHATS = 16
HEARTBEATS_SECONDS = 5.0
"""Until a heartbeat is given up."""


class EventfulTraffic:
    """Against a cluster of `kvasir up` with two simulated replicas."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        state = self._state()
        self._url = state.router_url
        self._redis_pid, self._redis_url = state.redis_pid, state.redis_url

    def run(self) -> None:
        wait_until(self._are_all_ready, "the replicas", seconds=60)
        for part in (self._chats, self._leave_and_err, self._crowd, self._lose_a_replica):
            asyncio.run(self._with_client(part))
        wait_until(self._are_all_ready, "the replica that died to be back", seconds=60)
        with self._redis_that_forgets():
            asyncio.run(self._with_client(self._chats))
            time.sleep(HEARTBEATS_SECONDS)
        asyncio.run(self._with_client(self._chats))
        asyncio.run(self._with_client(self._lose_all_replicas))

    async def _with_client(self, part: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=60, limits=limits) as client:
            await part(client)

    async def _chats(self, client: httpx.AsyncClient) -> None:
        """Of users who ask under their tenant's prompt, and again; some name themselves, some do not."""
        for number in range(NUM_CHATS):
            tenant, user = f"tenant-{number % 3}", f"user-{number % 4}"
            name = {"safety_identifier": user} if number % 5 else {}
            question = f"question {number // 2}"
            await asyncio.gather(
                *(self._chat(client, tenant, question + part, 12, **name) for part in ("", " again"))
            )
            await self._two_turns(client, question)
            await self._go_on_elsewhere(client, question)

    async def _two_turns(self, client: httpx.AsyncClient, question: str) -> None:
        """A conversation that goes on from its answer."""
        messages = [{"role": "user", "content": question}]
        for follow_up in ("And then?", ""):
            body = {"model": MODEL, "messages": messages, "max_tokens": 12}
            answer = await client.post("/v1/chat/completions", json=body)
            if answer.status_code != 200:
                return
            said = answer.json()["choices"][0]["message"]
            messages = [*messages, said, {"role": "user", "content": follow_up}]

    async def _go_on_elsewhere(self, client: httpx.AsyncClient, question: str) -> None:
        """A conversation with an answer that no router here has given."""
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "That is another service's to say."},
            {"role": "user", "content": "Then say it."},
        ]
        await client.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 4}
        )

    async def _leave_and_err(self, client: httpx.AsyncClient) -> None:
        for number in range(4):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._chat(client, "tenant-0", f"a long story {number}", 1000)
            body = {"model": "nobody", "messages": [{"role": "user", "content": "Hello"}]}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 404, answer.text
        large = {"model": MODEL, "messages": body["messages"], "metadata": {"padding": " " * 300_000}}
        answer = await client.post("/v1/chat/completions", json={**large, "max_tokens": 1})
        assert answer.status_code == 200, answer.text

    async def _crowd(self, client: httpx.AsyncClient) -> None:
        """More at once than runs or waits, each with an answer that outgrows its share of the cache."""
        crowd = [
            self._chat(client, f"crowd-{number % 30}", f"me first {number}", 300) for number in range(60)
        ]
        codes = await asyncio.gather(*crowd)
        assert 429 in codes and 200 in codes, codes

    async def _lose_a_replica(self, client: httpx.AsyncClient) -> None:
        """In the middle of answers, and with others on their way to it."""
        writes: asyncio.Queue[str] = asyncio.Queue()
        streams = [
            asyncio.create_task(self._chat(client, "tenant-2", f"is there time {number}", 300, writes))
            for number in range(8)
        ]
        replica_id = await writes.get()
        late = [
            asyncio.create_task(self._chat(client, "tenant-2", f"and now {number}", 8)) for number in range(8)
        ]
        await asyncio.sleep(0)
        self._kill([replica for replica in self._ready() if replica.replica_id == replica_id])
        await asyncio.gather(*streams, *late)

    async def _lose_all_replicas(self, client: httpx.AsyncClient) -> None:
        self._kill(self._ready())
        # Each with words of its own: one that comes back to replicas that die is taken for what kills them.
        asked = [f"is anybody there at {time.monotonic()}, {number}" for number in range(4)]
        codes = [await self._chat(client, "tenant-0", question, 8) for question in asked]
        assert 503 in codes, codes

    @contextlib.contextmanager
    def _redis_that_forgets(self) -> Iterator[None]:
        """It says nothing for a while, and comes back empty."""
        assert self._redis_pid is not None
        os.kill(self._redis_pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._redis_pid, signal.SIGCONT)
        with redis.Redis.from_url(self._redis_url) as client:
            client.flushall()

    async def _chat(
        self,
        client: httpx.AsyncClient,
        tenant: str,
        question: str,
        num_tokens: int,
        writes: "asyncio.Queue[str] | None" = None,
        **fields: str,
    ) -> int:
        """The status. `writes` gets the replica's name with each piece of the answer."""
        system = " ".join(f"{tenant} rule {number}" for number in range(SYSTEM_LINES))
        body = {
            "model": MODEL,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
            "max_tokens": num_tokens,
            "stream": True,
            "cache_salt": tenant,
            **fields,
        }
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                if writes is not None:
                    writes.put_nowait(answer.headers["x-kvasir-replica"])
            assert answer.status_code in (200, 429, 503), answer.status_code
            return answer.status_code

    def _kill(self, replicas: list[ReplicaEntry]) -> None:
        for replica in replicas:
            assert replica.pid is not None
            os.kill(replica.pid, signal.SIGKILL)

    def _ready(self) -> list[ReplicaEntry]:
        return [each for each in self._state().replicas if each.state == "ready"]

    def _are_all_ready(self) -> bool:
        return len(self._ready()) == len(self._state().replicas)

    def _state(self) -> ClusterState:
        state = self._directory.read_state()
        assert state is not None
        return state
