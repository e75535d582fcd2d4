"""A process whose event loop stands still ends, even where code holds Python's lock; others go on."""

import asyncio
import sys
import textwrap
from asyncio.subprocess import Process
from pathlib import Path

import grpc

from tests.replicas.mirror import connect, read_record
from tests.replicas.router_client import RouterClient, submit
from tests.replicas.standing_replica import STANDING_TOKENS
from tests.replicas.whole_replica import REPLICA

REPOSITORY = Path(__file__).parents[2]

PROGRAM = """
import asyncio, ctypes, threading, time
from replicas.process.standstill import end_on_standstill

def hold_lock(): ctypes.PyDLL(None).sleep(600)
def let_go(): time.sleep(600)

async def main():
    async with end_on_standstill(0.5):
        await asyncio.sleep(1.0)
        threading.Thread(target={work}, daemon=True).start()
        await asyncio.sleep(1.5)
    time.sleep(1.0)  # nothing is watched any more
    print("went on", flush=True)

asyncio.run(main())
"""


async def started(*arguments: str) -> Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=pipe, stderr=pipe, cwd=REPOSITORY
    )


async def test_what_holds_pythons_lock_ends_the_process_and_is_named() -> None:
    process = await started("-c", textwrap.dedent(PROGRAM.format(work="hold_lock")))
    async with asyncio.timeout(20):
        said, complaint = await process.communicate()
    assert (process.returncode, said) == (1, b"")
    assert b"Timeout" in complaint and b"in hold_lock" in complaint


async def test_what_only_takes_long_ends_nothing() -> None:
    process = await started("-c", textwrap.dedent(PROGRAM.format(work="let_go")))
    said, complaint = await process.communicate()
    assert (process.returncode, said, complaint) == (0, b"went on\n", b"")


async def test_a_replica_whose_engine_holds_pythons_lock_ends(redis_url: str) -> None:
    flags = [f"--replica-id={REPLICA}", f"--redis-url={redis_url}", "--standstill-seconds=1"]
    process = await started("-m", "tests.replicas.standing_replica", *flags)
    redis = connect(redis_url)
    while (record := await read_record(redis, "scripted", REPLICA)) is None:
        assert process.returncode is None
        await asyncio.sleep(0.02)
    async with grpc.aio.insecure_channel(record.address) as channel:
        client = RouterClient(channel)
        await client.send(submit(1, max_tokens=STANDING_TOKENS))
        async with asyncio.timeout(20):
            _, complaint = await process.communicate()
    assert process.returncode == 1
    assert b"in stand_still" in complaint
    await redis.aclose()
