"""Long work on the event loop lets others run, however many jobs there are."""

import asyncio
import json
import time

import httpx

from router.turns import TURN_SECONDS, Turns
from tests.router import tiny_model
from tests.router.http_server import http_server
from tests.router.scripted_dispatch import ScriptedRun, says

STEP_SECONDS = TURN_SECONDS / 4
NUM_JOBS = 16
NUM_STEPS = 40


class Passes:
    """How much is done in one pass of the event loop, at most."""

    def __init__(self) -> None:
        self.most = 0
        self._num = 0

    def did(self) -> None:
        self._num += 1
        self.most = max(self.most, self._num)

    async def run(self) -> None:
        while True:
            self._num = 0
            await asyncio.sleep(0)


async def test_one_job_of_many_does_one_piece_in_a_pass() -> None:
    turns, passes = Turns(), Passes()

    async def work() -> None:
        long = turns.long_work()
        for _ in range(NUM_STEPS):
            passes.did()
            until = time.monotonic() + STEP_SECONDS
            while time.monotonic() < until:
                pass
            await long.give_way()

    watching = asyncio.create_task(passes.run())
    async with asyncio.TaskGroup() as tasks:
        for _ in range(NUM_JOBS):
            tasks.create_task(work())
            await asyncio.sleep(0)  # each has a first piece before it waits for its turn
    watching.cancel()
    assert passes.most <= 2 * TURN_SECONDS / STEP_SECONDS


async def test_the_prompts_of_requests_start_in_passes_of_their_own() -> None:
    passes = Passes()

    class CountedRun(ScriptedRun):
        async def __aenter__(self) -> "ScriptedRun":
            passes.did()
            return await super().__aenter__()

    prompts = [[number % 300 + 10] for number in range(100)]
    body = json.dumps({"model": "tiny", "prompt": prompts, "max_tokens": 1})
    async with http_server() as server, httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        server.dispatcher.script = says([tiny_model.END_OF_TURN])
        server.dispatcher.run_type = CountedRun
        watching = asyncio.create_task(passes.run())
        answers = await asyncio.gather(*(client.post("/v1/completions", content=body) for _ in range(4)))
        watching.cancel()
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len(server.dispatcher.generations) == 400
    assert passes.most <= 2
