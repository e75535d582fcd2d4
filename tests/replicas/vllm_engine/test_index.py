"""The index in Redis against vLLM's own block pool, after a storm through the whole replica."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import pytest

from replicas.config import ReplicaConfig
from replicas.engine import Engine
from replicas.engine_process.build import build_engine
from replicas.host import ReplicaHost
from replicas.protocol.blocks import BlockHash, Namespace, hash_blocks, namespace_root, pack_token_ids
from replicas.protocol.events import BlockRemoved
from replicas.protocol.frames import Abort, RequestKey, SamplingParams, StepFrame, Submit, UserTag
from replicas.protocol.keys import is_indexed
from replicas.protocol.status import ModelCard, ReplicaId, TokenizerBundle
from tests.replicas.builders import EventBalance
from tests.replicas.engine_contract import prompt_of
from tests.replicas.mirror import connect, read_changes, read_set, replay
from tests.replicas.router_client import RouterClient
from tests.replicas.vllm_engine.conftest import vllm_config

if TYPE_CHECKING:
    from replicas.vllm_engine.engine import VllmEngine

pytestmark = pytest.mark.vllm

REPLICA = ReplicaId("vllm-in-a-storm")
SECRET = b"a secret of sixteen bytes or more"
USERS = tuple(UserTag(name.ljust(16)) for name in (b"ann", b"bob", b"carol"))
INDEX_STRIDE = 64  # two blocks
NUM_REQUESTS = 2000
REQUESTS_PER_ROUND = 50


class Place(NamedTuple):
    block_hash: BlockHash
    position: int


@dataclass
class Witness:
    """Stands at the engine's door: which of our hashes stands for each of vLLM's, by the requests alone."""

    engine: "VllmEngine"
    places: dict[bytes, Place] = field(default_factory=dict)
    prompt_ends: set[BlockHash] = field(default_factory=set)
    balance: EventBalance = field(default_factory=EventBalance)
    num_evicted: int = 0

    def attend(self) -> None:
        step = self.engine.step

        def witnessed() -> StepFrame:
            live = list(self.engine._live.values())
            frame = step()
            for entry in live:
                self._see(entry.inner, entry.request.submit.root)
            self.balance.apply(frame.events)
            self.num_evicted += sum(isinstance(event, BlockRemoved) for event in frame.events)
            return frame

        self.engine.step = witnessed  # type: ignore[method-assign]

    def _see(self, inner: Any, root: BlockHash) -> None:
        theirs = [bytes(digest) for digest in inner.block_hashes]
        if not theirs:
            return
        block_size = self.engine.card.block_size
        if theirs[-1] not in self.places:
            ours = hash_blocks(root, list(inner.all_token_ids), block_size)
            for position, (digest, block_hash) in enumerate(zip(theirs, ours, strict=False)):
                self.places[digest] = Place(block_hash, position)
        num_prompt_blocks = inner.num_prompt_tokens // block_size
        if num_prompt_blocks:
            self.prompt_ends.add(self.places[theirs[num_prompt_blocks - 1]].block_hash)

    def check(self, indexed: set[BlockHash]) -> None:
        """vLLM's pool against the index, and copy by copy against the events."""
        pool = {self.places[digest]: n for digest, n in self.engine.core.cached_hashes().items()}
        assert Counter({place.block_hash: n for place, n in pool.items()}) == self.balance.held
        block_size = self.engine.card.block_size
        on_stride = {
            place.block_hash for place in pool if is_indexed(place.position, block_size, INDEX_STRIDE)
        }
        between = {place.block_hash for place in pool} - on_stride
        assert on_stride <= indexed
        assert indexed - on_stride <= between & self.prompt_ends


def roots(card: ModelCard) -> dict[tuple[str | None, str], BlockHash]:
    fingerprints: dict[str | None, str | None] = {None: None}
    fingerprints |= {adapter.name: f"{adapter.name}:{adapter.fingerprint}" for adapter in card.adapters}
    return {
        (name, salt): namespace_root(
            SECRET, Namespace(bytes.fromhex(card.fingerprint), card.block_size, adapter=adapter, salt=salt)
        )
        for name, adapter in fingerprints.items()
        for salt in ("salt", "pepper")
    }


def requests(engine: "VllmEngine", rng: random.Random) -> Iterator[Submit]:
    """Prefixes of a few long prompts, each with an end of its own, under some user, adapter and salt.

    Adapters are asked for in every fifth round only: on a CPU they cost vLLM more than the model does.
    """
    shared = [prompt_of(engine, 160, n) for n in range(4)]
    namespaces = roots(engine.card)
    plain = [key for key in namespaces if key[0] is None]
    for submit_id in range(1, NUM_REQUESTS + 1):
        tail = prompt_of(engine, rng.randrange(1, 40), rng.randrange(10**6))
        is_mixed = submit_id // REQUESTS_PER_ROUND % 5 == 0
        adapter, salt = rng.choice(list(namespaces) if is_mixed else plain)
        yield Submit(
            submit_id,
            pack_token_ids([*rng.choice(shared)[: rng.randrange(160)], *tail]),
            SamplingParams(
                max_tokens=rng.choices((1, 2, 40), (80, 15, 5))[0], temperature=0.0, ignore_eos=True
            ),
            namespaces[adapter, salt],
            num_choices=2 if rng.random() < 0.05 else 1,
            adapter=adapter,
            user=rng.choice(USERS),
        )


async def play_round(client: RouterClient, submits: list[Submit], rng: random.Random) -> None:
    """Submit them a few at a time, abort some, and read until all the others have ended."""
    aborted = {submit.submit_id for submit in submits[:-1] if rng.random() < 0.15}
    for at in range(0, len(submits), 10):
        part = submits[at : at + 10]
        await client.send(*part)
        await client.send(*(Abort(submit.submit_id) for submit in part if submit.submit_id in aborted))
    open_keys = {
        RequestKey(submit.submit_id, choice)
        for submit in submits
        if submit.submit_id not in aborted
        for choice in range(submit.num_choices)
    }
    while open_keys:
        frame = await client.read()
        assert frame is not None
        for delta in frame.deltas:
            assert delta.refusal is None
            if delta.finish_reason is not None:
                open_keys.discard(delta.key)


@pytest.mark.timeout(600)
async def test_the_index_in_redis_equals_the_block_pool_of_vllm_after_a_storm(
    environment: None, adapters: Mapping[str, str], redis_url: str
) -> None:
    """Evictions, aborts, resets; several users, salts and adapters; through gRPC and the index writer."""
    built: list[Any] = []

    def build(config: ReplicaConfig) -> tuple[Engine, TokenizerBundle]:
        engine, bundle = build_engine(config)
        built.append(engine)
        return engine, bundle

    config = vllm_config(
        replica_id=REPLICA,
        redis_url=redis_url,
        adapters=adapters,
        index_stride=INDEX_STRIDE,
        max_running=32,
        max_batched_tokens=512,
    )
    host = ReplicaHost(config, build=build)
    await host.start()
    (engine,) = built
    witness = Witness(engine)
    witness.attend()
    redis = connect(redis_url)
    rng = random.Random(17)
    pending = list(requests(engine, rng))
    num_resets = 0

    async def indexed() -> set[BlockHash]:
        assert host._parts is not None
        while not host._parts.index.is_settled:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        found = await read_set(redis, engine.card.name, REPLICA, host.epoch)
        assert found == replay(await read_changes(redis, engine.card.name, host.epoch))
        assert found is not None
        return found

    async with grpc.aio.insecure_channel(host.address) as channel:
        client = RouterClient(channel)
        while pending:
            submits, pending = pending[:REQUESTS_PER_ROUND], pending[REQUESTS_PER_ROUND:]
            await play_round(client, submits, rng)
            witness.check(await indexed())
            if rng.random() < 0.3:  # nothing runs, so the engine's thread is not in the engine
                assert engine.reset_prefix_cache()
                num_resets += 1
    assert num_resets
    assert witness.num_evicted
    await host.stop()
    await redis.aclose()
