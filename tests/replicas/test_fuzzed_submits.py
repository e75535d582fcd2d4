"""Whatever a submit says, a replica answers it, lives, leaks nothing and does not disturb the others.

Over real gRPC, with our own engine in its thread and with vLLM in a process of its own.
"""

import asyncio
import importlib.util
import random
from collections.abc import Sequence

import grpc
import pytest

from replicas.host import ReplicaHost
from replicas.protocol.blocks import pack_token_ids
from replicas.protocol.frames import Abort, FinishReason, RefusalCode, RequestKey, SamplingParams, Submit
from replicas.protocol.service import ReplicaStub
from replicas.protocol.status import ModelCard, ReplicaState
from replicas.protocol.wire import encode
from replicas.serving.server import MAX_CHOICES
from tests.replicas.fuzzed_submits import Plain, broken_submit, fuzzed_submit, random_bytes
from tests.replicas.router_client import ROOT, RouterClient
from tests.replicas.whole_replica import config, running

NUM_ROUNDS, PER_ROUND = 8, 15
NUM_BROKEN = 25

SEEDS = (1,)

ENGINES = [
    pytest.param("torch", {"num_threads": 1}, id="torch"),
    pytest.param(
        "vllm",
        {"num_threads": 1},
        id="vllm",
        marks=[
            pytest.mark.vllm,
            pytest.mark.timeout(400),
            pytest.mark.skipif(
                importlib.util.find_spec("vllm") is None,
                reason="vLLM is not installed: ./kvasir test --all installs it",
            ),
        ],
    ),
]


def reference(submit_id: int) -> Submit:
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompt = [5 + (7 * n + submit_id % 3) % 250 for n in range(70)]
    return Submit(submit_id, pack_token_ids(prompt), sampling, ROOT)


async def answers(client: RouterClient, submit_ids: Sequence[int]) -> list[tuple[int, ...]]:
    found = await client.finish(*((submit_id, 0) for submit_id in submit_ids))
    return [
        tuple(token for delta in found[RequestKey(submit_id, 0)] for token in delta.token_ids)
        for submit_id in submit_ids
    ]


async def all_ends(client: RouterClient, submits: Sequence[Plain]) -> list[RefusalCode | None]:
    """How each choice of each ends; one that goes on and on is aborted, and counts as none."""
    open_keys = {
        RequestKey(submit["submit_id"], choice)
        for submit in submits
        for choice in range(min(submit["num_choices"], MAX_CHOICES))
    }
    seen: dict[RequestKey, int] = dict.fromkeys(open_keys, 0)
    ends: list[RefusalCode | None] = []
    while open_keys:
        frame = await client.read()
        assert frame is not None, "the stream ended"
        for delta in frame.deltas:
            if delta.key not in open_keys:
                continue
            seen[delta.key] += len(delta.token_ids)
            if delta.finish_reason is not None:
                assert (delta.finish_reason is FinishReason.ERROR) == (delta.refusal is not None)
                ends.append(None if delta.refusal is None else delta.refusal.code)
                open_keys.discard(delta.key)
            elif seen[delta.key] > 20:
                await client.send(Abort(delta.key.number, delta.key.choice))
                open_keys.discard(delta.key)
    return ends


async def fuzz_rounds(rng: random.Random, card: ModelCard, channel: grpc.aio.Channel) -> None:
    fuzzer, other = RouterClient(channel), RouterClient(channel)
    await other.send(*(reference(number) for number in range(3)))
    expected = await answers(other, range(3))
    assert len(set(expected)) == 3
    number, codes = 1000, set[RefusalCode | None]()
    for _ in range(NUM_ROUNDS):
        submits = [fuzzed_submit(rng, number + n, card) for n in range(PER_ROUND)]
        unknown = [Abort(rng.randrange(2**64), rng.choice((None, 0, 2**32 - 1)))]
        await fuzzer.call.write(encode([submits, unknown]))
        await other.send(*(reference(number + n) for n in range(3)))
        assert await answers(other, range(number, number + 3)) == [
            expected[(number + n) % 3] for n in range(3)
        ]
        codes |= set(await all_ends(fuzzer, submits))
        number += PER_ROUND
    assert codes >= {None, RefusalCode.INVALID_REQUEST, RefusalCode.CONTEXT_LENGTH_EXCEEDED}
    assert codes <= {None, *RefusalCode} - {RefusalCode.INTERNAL}


async def break_streams(rng: random.Random, card: ModelCard, channel: grpc.aio.Channel) -> None:
    """What is no frame ends its own stream, and nothing else."""
    serve = ReplicaStub(channel).serve
    for number in range(NUM_BROKEN):
        call = serve()
        if number % 2:
            await call.write(encode([[broken_submit(rng)]]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while True:
                    await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        else:  # it may be a frame all the same
            await call.write(random_bytes(rng, fuzzed_submit(rng, 1, card)))
            await asyncio.sleep(0.02)
            call.cancel()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("engine", "settings"), ENGINES)
async def test_no_submit_ends_a_replica_or_changes_what_others_read(
    redis_url: str, engine: str, settings: dict[str, object], seed: int
) -> None:
    host = ReplicaHost(
        config(
            redis_url,
            engine=engine,
            num_blocks=128,
            context_length=256,
            max_batched_tokens=256,
            max_running=16,
            max_open_tokens=10**7,
            **settings,
        )
    )
    rng = random.Random(seed)
    async with running(host) as client, grpc.aio.insecure_channel(host.address) as channel:
        assert host._parts is not None
        card = host._parts.card
        await fuzz_rounds(rng, card, channel)
        await break_streams(rng, card, channel)
        await client.send(reference(1))
        await answers(client, [1])
        frame = await client.read()
        while frame is not None and frame.load.num_running + frame.load.num_used_blocks:
            frame = await client.read()
        assert frame is not None
        load = frame.load
        assert (load.num_waiting, load.num_pending_tokens, load.num_context_tokens) == (0, 0, 0)
        assert host.state is ReplicaState.READY
        value = host._parts.metrics.registry.get_sample_value
        assert value("replica_open_sequences") == value("replica_open_tokens") == 0
        assert value("replica_arrived_requests") == value("replica_announcements") == 0
