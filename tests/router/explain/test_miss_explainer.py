"""What a router says of a prompt by what it has seen before."""

from types import SimpleNamespace
from typing import Any, cast

from replicas.protocol.blocks import BlockHash, hash_blocks, pack_token_ids
from replicas.protocol.frames import NO_USER, PromptUsage
from replicas.protocol.status import Epoch, ReplicaId
from router.explain.chain_tree import NamespaceName
from router.explain.miss_explainer import MissExplainer
from router.explain.sightings import Sighting
from router.generation import Generation
from router.routing.overlap import PrefixIndex
from tests.router.explain.decisions import BLOCK_SIZE, decision

ROOT = BlockHash(bytes(16))
A = ReplicaId("a")
TOKENS = list(range(1000))
HASHES = hash_blocks(ROOT, TOKENS, BLOCK_SIZE)


def generation(model: str) -> Generation:
    made: Any = SimpleNamespace(
        model=model,
        submit=SimpleNamespace(root=ROOT, packed_tokens=pack_token_ids(TOKENS)),
        block_hashes=HASHES,
        token_ids=TOKENS,
        caller=SimpleNamespace(owner=None),
        salt_tag=b"",
    )
    return cast(Generation, made)


def seen(explainer: MissExplainer, model: str, replica_id: ReplicaId) -> None:
    explainer.sightings.see(
        Sighting(
            root=ROOT,
            namespace=NamespaceName(model, None, None),
            block_hashes=HASHES,
            block_size=BLOCK_SIZE,
            user=NO_USER,
            key=None,
            replica_id=replica_id,
            num_cached_tokens=0,
            num_cross_user_tokens=0,
            num_own_tokens=0,
            decided_at=1.0,
            ended_at=2.0,
            epoch=Epoch("first"),
        )
    )


def test_what_another_name_of_the_same_weights_was_asked_is_no_restart_of_its_replica() -> None:
    indexes = {name: PrefixIndex(BLOCK_SIZE, 128) for name in ("one", "other")}
    indexes["one"].replace(A, Epoch("first"), ())
    explainer = MissExplainer(lambda model: BLOCK_SIZE, indexes.get)
    seen(explainer, "one", A)
    usage = PromptUsage(1000, 0, 0)
    asked = explainer.misses(generation("other"), decision(b=0), usage, decided_at=3.0)
    assert asked.cause == "other_namespace"
    assert explainer.misses(generation("one"), decision(a=0), usage, decided_at=3.0).cause == "evicted"
    indexes["one"].replace(A, Epoch("second"), ())
    asked = explainer.misses(generation("one"), decision(a=0), usage, decided_at=3.0)
    assert asked.cause == "replica_restarted"


def test_behind_the_last_indexed_block_another_replica_still_has_the_rest() -> None:
    index = PrefixIndex(BLOCK_SIZE, 128)
    index.replace(A, Epoch("first"), ())
    explainer = MissExplainer(lambda model: BLOCK_SIZE, lambda model: index)
    seen(explainer, "one", A)
    short = generation("one")
    cast(Any, short).block_hashes = HASHES[:6]
    found = explainer.misses(short, decision(b=0), PromptUsage(100, 0, 0), decided_at=3.0)
    assert (found.cause, found.spans[0].end, found.spans[0].replica_id) == ("held_elsewhere", 96, A)
