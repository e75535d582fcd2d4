"""Routing tables of equal replicas, prompts that share a beginning, and what replicas report of them."""

import random
from collections.abc import Sequence

from replicas.protocol.blocks import BlockHash, hash_blocks, pack_token_ids
from replicas.protocol.status import Epoch, ModelCard, ReplicaId
from router.routing.bucket import bucket_of
from router.routing.cost import CostParameters
from router.routing.decision import RoutingRequest
from router.routing.table import RoutedRequest, RoutingTable

ROOT = BlockHash(b"r" * 16)
BLOCK_SIZE = 16
STRIDE = 128
CARD = ModelCard("m", "fingerprint", "simulated", BLOCK_SIZE, 1000, 100_000, 1000)


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def table_of(size: int, policy: str = "kvasir", clock: Clock | None = None) -> RoutingTable:
    table = RoutingTable(policy, CostParameters(), random.Random(1), clock=clock)
    for number in range(size):
        table.add_replica(ReplicaId(f"r{number}"), CARD, STRIDE)
    return table


def prompt(shared: int, number: int, own: int) -> list[int]:
    """`shared` tokens that all have, then `own` ones that depend on `number`."""
    return [*range(shared), *(100_000 * (number + 1) + position for position in range(own))]


def route(
    table: RoutingTable, tokens: Sequence[int], key: str | None = None, **options: object
) -> RoutedRequest:
    bucket = bucket_of(ROOT, key, pack_token_ids(tokens), None, BLOCK_SIZE)
    request = RoutingRequest(bucket, len(tokens), BLOCK_SIZE)
    return table.route("m", request, hash_blocks(ROOT, tokens, BLOCK_SIZE), **options)  # type: ignore[arg-type]


def store(table: RoutingTable, replica_id: ReplicaId, tokens: Sequence[int]) -> None:
    """The replica reports that it holds this prompt."""
    index = table.index("m")
    hashes = hash_blocks(ROOT, tokens, BLOCK_SIZE)
    index.replace(replica_id, Epoch("e"), {*index.stored(replica_id), *hashes[7::8], *hashes[-1:]})
