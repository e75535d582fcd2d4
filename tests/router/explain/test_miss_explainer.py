"""What a router says of a prompt by what it has seen before."""

from collections.abc import Callable

from replicas.protocol.blocks import BlockHash, hash_blocks, pack_token_ids
from replicas.protocol.events import Removal
from replicas.protocol.frames import NO_USER, PromptUsage
from replicas.protocol.keys import IndexChange
from replicas.protocol.status import Epoch, ReplicaId
from router.explain.miss_explainer import MissExplainer
from router.explain.nearest import Digests, PromptFacts
from router.explain.prefix_tree import NamespaceName, Seen
from router.explain.prompt_memory import PromptMemory
from router.routing.overlap import PrefixIndex
from tests.router.explain.decisions import BLOCK_SIZE, decision

ROOT = BlockHash(bytes(16))
A = ReplicaId("a")
TOKENS = list(range(1000))
HASHES = hash_blocks(ROOT, TOKENS, BLOCK_SIZE)
KEY = bytes(16)


def facts(model: str, num_blocks: int = len(HASHES)) -> PromptFacts:
    namespace = NamespaceName(model, None, "default")
    packed = b"".join(HASHES[:num_blocks])
    return PromptFacts(Digests(KEY), "default", ROOT, namespace, BLOCK_SIZE, packed, pack_token_ids(TOKENS))


def after_one(index_of: Callable[[str], PrefixIndex | None]) -> MissExplainer:
    """After the prompt was served once."""
    usage = PromptUsage(1000, 0, 1000)
    seen = Seen(
        usage=usage, model="one", user=NO_USER, key=None, replica_id=A, ended_at=2.0, epoch=Epoch("first")
    )
    memory = PromptMemory(2**20, KEY)
    memory.add(facts("one"), seen)
    return MissExplainer(memory, index_of)


def test_what_another_name_of_the_same_weights_was_asked_is_no_restart_of_its_replica() -> None:
    indexes = {name: PrefixIndex(BLOCK_SIZE, 128) for name in ("one", "other")}
    indexes["one"].replace(A, Epoch("first"), ())
    explainer = after_one(indexes.get)
    usage = PromptUsage(1000, 0, 0)
    asked = explainer.misses(facts("other"), decision(b=0), usage, decided_at=3.0)
    assert asked.cause == "other_namespace"
    assert explainer.misses(facts("one"), decision(a=0), usage, decided_at=3.0).cause == "evicted"
    indexes["one"].replace(A, Epoch("second"), ())
    asked = explainer.misses(facts("one"), decision(a=0), usage, decided_at=3.0)
    assert asked.cause == "replica_restarted"


def test_behind_the_last_indexed_block_another_replica_still_has_the_rest() -> None:
    index = PrefixIndex(BLOCK_SIZE, 128)
    index.replace(A, Epoch("first"), ())
    found = after_one(lambda model: index).misses(
        facts("one", 6), decision(b=0), PromptUsage(100, 0, 0), decided_at=3.0
    )
    assert (found.cause, found.spans[0].end, found.spans[0].replica_id) == ("held_elsewhere", 96, A)


def test_a_prompt_whose_replica_was_cleared_lost_all_of_it_by_that() -> None:
    """Behind the last of its blocks that the index names, too."""
    index, stored = PrefixIndex(BLOCK_SIZE, 128), tuple(HASHES[7::8])
    index.replace(A, Epoch("first"), stored)
    reasons = bytes([Removal.CLEARED]) * len(stored)
    index.apply(IndexChange(A, Epoch("first"), 1, removed=stored, reasons=reasons))
    found = after_one(lambda model: index).misses(
        facts("one", 30), decision(a=0), PromptUsage(500, 0, 0), decided_at=3.0
    )
    assert (found.spans[0].cause, found.spans[0].end) == ("cleared", 480)
