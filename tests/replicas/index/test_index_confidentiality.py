"""Whoever reads all that is in Redis cannot confirm what anybody's prompt was."""

import asyncio
import hashlib
import itertools
import struct
from dataclasses import replace
from typing import Any

import grpc

from replicas.engine_process.build import build_engine
from replicas.host import ReplicaHost
from replicas.protocol.blocks import (
    HASH_BYTES,
    BlockHash,
    Namespace,
    hash_blocks,
    namespace_root,
    pack_token_ids,
)
from replicas.protocol.call_tokens import METADATA_KEY, Audience, Caller, Role
from replicas.protocol.cluster_secret import Purpose, derive
from replicas.protocol.frames import SamplingParams, Submit
from replicas.protocol.wire import SERVICE_NAME
from tests.replicas.mirror import connect, read_changes, read_set
from tests.replicas.router_client import RouterClient
from tests.replicas.whole_replica import MODEL, REPLICA, config, until

SECRET = b"a secret of the cluster, unknown"
PROMPT = list(range(1000, 1064))
BLOCK = 16


async def dumped(redis: Any) -> list[bytes]:
    """Every key, field and value."""
    found: list[bytes] = []
    for key in await redis.keys("*"):
        found.append(key)
        match await redis.type(key):
            case b"set":
                found += await redis.smembers(key)
            case b"hash":
                found += itertools.chain.from_iterable((await redis.hgetall(key)).items())
            case b"stream":
                for _, fields in await redis.xrange(key):
                    found += itertools.chain.from_iterable(fields.items())
            case b"string":
                found.append(await redis.get(key))
            case other:
                raise AssertionError(f"{key} is a {other}")
    return found


def windows(values: list[bytes]) -> set[bytes]:
    """All that may be a hash or a key, wherever it begins."""
    return {value[at : at + HASH_BYTES] for value in values for at in range(len(value) - HASH_BYTES + 1)}


def guesses(seen: set[bytes], namespaces: list[Namespace]) -> set[bytes]:
    """What follows from the prompt itself, and from all that was seen or can be guessed of a namespace."""
    blocks = [PROMPT[at : at + BLOCK] for at in range(0, len(PROMPT), BLOCK)]
    packed = [struct.pack(f"<{BLOCK}I", *block) for block in blocks]
    unkeyed = {hashlib.sha256(parent + block).digest()[:HASH_BYTES] for parent in seen for block in packed}
    poor_secrets = (bytes(16), bytes(32), b"kvasir" * 4)
    roots = {namespace_root(secret, namespace) for secret in poor_secrets for namespace in namespaces}
    roots |= {BlockHash(value) for value in (*seen, bytes(HASH_BYTES))}
    chains = {each for root in roots for each in hash_blocks(root, PROMPT, BLOCK)}
    continued = {
        each
        for value in seen
        for block in blocks
        for each in hash_blocks(BlockHash(value), block, BLOCK, parent=BlockHash(value))
    }
    return unkeyed | chains | continued


async def test_the_whole_content_of_redis_confirms_no_guess_of_a_prompt_whose_salt_is_known(
    redis_url: str,
) -> None:
    settings = config(redis_url, block_size=BLOCK, index_stride=BLOCK, secret=SECRET.hex())
    engine, bundle = await asyncio.to_thread(build_engine, settings)
    namespace = Namespace(bytes.fromhex(engine.card.fingerprint), BLOCK, salt="pepper")
    root = namespace_root(SECRET, namespace)
    hashes = hash_blocks(root, PROMPT, BLOCK)
    host = ReplicaHost(settings, build=lambda _: (engine, bundle))
    await host.start()
    redis = connect(redis_url)
    caller = Caller(derive(SECRET, Purpose.CALLS), Role.ROUTER, Audience(REPLICA, host.epoch))
    token = caller.token(f"/{SERVICE_NAME}/Serve", bytes(16))
    async with grpc.aio.insecure_channel(host.address) as channel:
        client = RouterClient(channel, [(METADATA_KEY, token)])
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        asked = Submit(
            1, pack_token_ids([*PROMPT, 7]), sampling, root, announcement_id=9, announced_hashes=tuple(hashes)
        )
        await client.send(asked)
        await client.finish((1, 0))

        async def is_indexed() -> bool:
            return await read_set(redis, MODEL, REPLICA, host.epoch) == set(hashes)

        await until(is_indexed)
        assert any(change.announced for change in await read_changes(redis, MODEL, host.epoch))
        seen = windows(await dumped(redis))
    assert set(hashes) <= seen  # the attack below would find them
    assert root not in seen
    known = [namespace, replace(namespace, salt=None)]
    assert not guesses(seen, known) & seen
    await redis.aclose()
    await host.stop()
