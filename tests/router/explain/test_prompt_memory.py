"""The nearest earlier prompt: against a list of all of them, within a tenant alone, and within the bound."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.protocol.blocks import BlockHash, hash_blocks, pack_token_ids
from replicas.protocol.frames import NO_USER, PromptUsage
from replicas.protocol.status import ReplicaId
from router.explain.nearest import Digests, Nearest, PromptFacts, RememberedPrompt
from router.explain.outline import outline_of
from router.explain.prefix_tree import Known, NamespaceName, Seen
from router.explain.prompt_memory import BYTES_WHEN_OFF, PromptMemory
from tests.examples import examples

BLOCK_SIZE = 4
ROOTS = [BlockHash(bytes([number]) * 16) for number in range(3)]
KEY = b"k" * 16
DIGESTS = Digests(KEY)
SEEN = Seen(
    usage=PromptUsage(1, 0, 0), model="m", user=NO_USER, key=None, replica_id=ReplicaId("r"), ended_at=1.0
)
PLENTY = 2**24


def facts(
    token_ids: list[int],
    *,
    tenant: str = "ada",
    root: int = 0,
    salt: bytes = b"",
    texts: tuple[str, ...] = (),
) -> PromptFacts:
    hashes = hash_blocks(ROOTS[root], token_ids, BLOCK_SIZE)
    messages = [{"role": "user", "content": text} for text in texts]
    return PromptFacts(
        DIGESTS,
        tenant,
        ROOTS[root],
        NamespaceName(f"model-{root}", None, tenant),
        BLOCK_SIZE,
        b"".join(hashes),
        pack_token_ids(token_ids),
        salt,
        outline_of([], messages, {}, None),
    )


def remember(memory: PromptMemory, asked: PromptFacts, ids: tuple[str, ...], at: float) -> RememberedPrompt:
    made = memory.add(asked, SEEN, ids, at)
    assert made is not None
    return made


def num_common(ours: list[int], theirs: list[int]) -> int:
    both = zip(ours, theirs, strict=False)
    return next((at for at, (a, b) in enumerate(both) if a != b), min(len(ours), len(theirs)))


PROMPTS = st.lists(st.integers(0, 2), max_size=14)
WHOLE_BLOCKS = st.lists(st.integers(0, 2), max_size=4).map(
    lambda some: [one for one in some for _ in range(4)]
)
SENT = st.tuples(st.integers(0, 1), st.integers(0, 1))


@settings(max_examples=examples(300))
@given(st.booleans(), st.data())
def test_the_longest_common_beginning_is_that_of_a_list(is_whole: bool, data: st.DataObject) -> None:
    """To the token for whole blocks; tokens behind a prompt's last whole block may be forgotten."""
    prompts = WHOLE_BLOCKS if is_whole else PROMPTS
    earlier = data.draw(st.lists(st.tuples(SENT, prompts), max_size=15))
    asked = data.draw(prompts)
    memory = PromptMemory(PLENTY, KEY)
    for number, ((tenant, root), token_ids) in enumerate(earlier):
        one = facts(token_ids, tenant=f"t{tenant}", root=root)
        remember(memory, one, (f"id-{number}",), float(number))
    found = memory.nearest(facts(asked, tenant="t0", root=0))
    mine = [token_ids for sent, token_ids in earlier if sent == (0, 0)]
    longest = max((num_common(asked, one) for one in mine), default=0)
    least = longest if is_whole else longest // BLOCK_SIZE * BLOCK_SIZE
    if found is None:
        assert not least
        return
    sent, theirs = earlier[int(found.prompt.ids[0].removeprefix("id-"))]
    assert sent == (0, 0)
    assert found.num_common_tokens == num_common(asked, theirs) >= least
    assert found.goes_on == (found.num_common_tokens < min(len(theirs), len(asked)))


@settings(max_examples=examples(300))
@given(st.data())
def test_what_is_nearest_is_the_same_when_it_is_asked_for_later(data: st.DataObject) -> None:
    texts = st.lists(st.sampled_from("abcde"), max_size=4).map(tuple)
    some = st.lists(st.tuples(SENT, st.one_of(PROMPTS, WHOLE_BLOCKS), texts, st.booleans()), max_size=15)
    memory = PromptMemory(PLENTY, KEY)
    found_at_once = []
    for number, ((tenant, root), token_ids, said, is_salted) in enumerate(data.draw(some)):
        salt = b"salt" if is_salted else b""
        one = facts(token_ids, tenant=f"t{tenant}", root=root, salt=salt, texts=said)
        nearest = memory.nearest(one, across_salts=is_salted)
        prompt = remember(memory, one, (f"id-{number}",), float(number))
        prompt.across_salts = is_salted
        found_at_once.append((one, prompt, nearest))
    for one, prompt, nearest in found_at_once:
        rebuilt, later = memory.nearest_before(one.tenant, prompt)
        assert later == nearest
        assert (rebuilt.packed_hashes, rebuilt.num_tokens) == (one.packed_hashes, one.num_tokens)


def test_prompts_of_one_conversation_find_each_other_under_another_root_and_in_their_first_token() -> None:
    memory = PromptMemory(PLENTY, KEY)
    texts = ("where is the lamp", "by the river", "and the stone")
    remember(memory, facts(list(range(40)), texts=texts), ("first",), 1.0)
    elsewhere = memory.nearest(facts(list(range(40)), root=1, texts=texts))
    assert elsewhere is not None
    assert (elsewhere.prompt.ids, elsewhere.num_common_tokens) == (("first",), None)
    changed = memory.nearest(facts([99, *range(1, 40)], texts=texts))
    assert changed is not None
    assert (changed.num_common_tokens, changed.goes_on) == (0, True)


def test_of_prompts_that_part_at_one_token_the_last_is_the_nearest() -> None:
    memory = PromptMemory(PLENTY, KEY)
    for at, (name, token_id) in enumerate([("first", 5), ("second", 6), ("like the first", 5)]):
        remember(memory, facts([1, 1, 1, 1, 7, token_id, 2, 2]), (name,), float(at))
    found = memory.nearest(facts([1, 1, 1, 1, 7, 3, 2, 2]))
    assert found is not None and (found.prompt.ids, found.num_common_tokens) == (("like the first",), 5)


def test_who_chooses_a_salt_is_found_only_by_those_who_may_look_across_salts() -> None:
    memory = PromptMemory(PLENTY, KEY)
    texts = ("one", "two", "three")
    remember(memory, facts(list(range(20)), salt=b"a", texts=texts), ("first",), 1.0)
    asked = facts(list(range(20)), root=1, salt=b"b", texts=texts)
    assert memory.nearest(asked) is None
    assert memory.nearest(asked, across_salts=True) is not None


def test_nothing_of_another_tenant_is_found_by_prompt_or_by_id() -> None:
    memory = PromptMemory(PLENTY, KEY)
    remember(memory, facts(list(range(20)), tenant="ada", texts=("a", "b", "c")), ("first",), 1.0)
    assert memory.nearest(facts(list(range(20)), tenant="grace", texts=("a", "b", "c"))) is None
    assert memory.find("grace", "first") is None
    assert memory.find("ada", "first") is not None


def test_memory_is_bounded_and_a_tenant_keeps_its_part_beside_one_that_floods() -> None:
    memory = PromptMemory(200_000, KEY)
    rng = Random(1)
    small = [facts([rng.randrange(9) for _ in range(30)], tenant="small") for _ in range(20)]
    for number, one in enumerate(small):
        remember(memory, one, (f"small-{number}",), 0.0)
    for number in range(2000):
        token_ids = [rng.randrange(9) for _ in range(60)]
        remember(memory, facts(token_ids, tenant="big", texts=(str(number),)), (f"big-{number}",), 0.0)
        assert memory.num_bytes <= 200_000
    assert all(memory.find("small", f"small-{number}") is not None for number in range(20))
    assert memory.find("big", "big-0") is None
    assert memory.find("big", "big-1999") is not None
    assert memory.num_forgotten > 1000


@pytest.mark.parametrize(
    ("num_more_tokens", "num_more_pieces", "is_own"),
    [
        *[(0, 2, True), (7, 2, True), (8, 2, False), (11, 3, True), (12, 3, False)],
        *[(15, 4, True), (16, 4, False), (15, 9, True), (16, 9, False), (1, 1, False)],
    ],
)
def test_the_same_conversation_is_nearer_than_an_unrelated_one_with_a_little_more_at_its_beginning(
    num_more_tokens: int, num_more_pieces: int, is_own: bool
) -> None:
    """A piece is worth a block, from two on and up to four."""
    memory = PromptMemory(PLENTY, KEY)
    asked = list(range(100, 140))
    pieces = tuple(f"piece {number}" for number in range(num_more_pieces))
    for name, num_common, texts in (
        ("own", 20, ("before", *pieces)),
        ("unrelated", 20 + num_more_tokens, ("something", "else")),
    ):
        token_ids = [*asked[:num_common], *[7] * (40 - num_common)]
        remember(memory, facts(token_ids, texts=texts), (name,), 1.0)
    found = memory.nearest(facts(asked, texts=("now", *pieces)))
    assert found is not None and found.prompt.ids == (("own",) if is_own else ("unrelated",))


def test_all_is_given_back_when_a_tenant_is_forgotten() -> None:
    memory = PromptMemory(30_000, KEY)
    rng = Random(2)
    for number in range(500):
        token_ids = [rng.randrange(3) for _ in range(rng.randrange(40))]
        remember(
            memory, facts(token_ids, tenant=f"t{number % 50}", texts=("x", str(number))), (str(number),), 0.0
        )
    held = sum(tenant.num_bytes for tenant in memory._tenants.values())
    assert held == memory.num_bytes <= 30_000
    for tenant in memory._tenants.values():
        assert len(tenant.records) >= 1
        assert tenant.num_bytes > 0


@pytest.mark.parametrize(
    ("before", "now", "is_changed"),
    [
        (("q", "a", "r"), ("q", "a", "R", "s"), True),
        (("q", "a", "r"), ("Q", "a", "r", "s"), True),
        (("q", "a"), ("q", "b"), False),
        (("q",), ("other",), False),
    ],
)
def test_a_prompt_is_changed_where_it_is_the_same_conversation_with_something_else_in_its_midst(
    before: tuple[str, ...], now: tuple[str, ...], is_changed: bool
) -> None:
    memory = PromptMemory(PLENTY, KEY)
    remember(memory, facts([1, 2, 3, 4, 5, 6, 7, 8, 9], texts=before), ("first",), 1.0)
    found = memory.nearest(facts([1, 2, 3, 4, 5, 0, 7, 8, 9, 9, 9], texts=now))
    assert isinstance(found, Nearest)
    assert (found.num_common_tokens, found.is_changed) == (5, is_changed)


def known(memory: PromptMemory, asked: PromptFacts) -> Known:
    return memory.known(asked, num_cached_tokens=0, decided_at=1.0)


def test_what_one_tenant_of_a_group_has_computed_is_known_to_the_others_and_to_nobody_else() -> None:
    memory = PromptMemory(PLENTY, KEY)
    remember(memory, facts(list(range(20)), tenant="ada"), ("first",), 1.0)
    remember(memory, facts([9] * 20, tenant="grace"), ("second",), 1.0)
    for tenant in ("ada", "grace", "mary"):
        assert known(memory, facts(list(range(20)), tenant=tenant)).num_tokens == 20
        assert known(memory, facts(list(range(20)), tenant=tenant, root=1)).num_tokens == 0


def test_a_beginning_that_was_seen_in_another_namespace_is_known_to_have_been() -> None:
    memory = PromptMemory(PLENTY, KEY)
    for beginning, root, is_elsewhere in [
        (b"a", 0, False),
        (b"a", 0, False),
        (b"a", 1, True),
        (b"a", 0, True),
    ]:
        asked = replace(facts([1, 2, 3, 4], root=root), beginning=beginning)
        assert known(memory, asked).is_elsewhere == is_elsewhere
        remember(memory, asked, (), 1.0)
    assert not known(memory, facts([1, 2, 3, 4], root=1)).is_elsewhere


def test_what_is_above_a_chosen_prefix_is_chosen_whoever_had_it() -> None:
    memory = PromptMemory(PLENTY, KEY)
    rng = Random(3)
    for number in range(60):
        token_ids = [rng.randrange(2) for _ in range(4) for _ in range(4)]
        whole = [one for one in token_ids for _ in range(4)]
        remember(memory, facts(whole, tenant=f"t{number % 3}", root=number % 2), (), 1.0)
    nodes = memory.recent(1000)
    assert len(nodes) == memory.num_nodes > 30
    assert [node.latest for node in nodes] == sorted((node.latest for node in nodes), reverse=True)
    for number in range(len(nodes)):
        assert memory.recent(number) == nodes[:number]
        for chosen in (nodes[:number], memory.most_used(number)):
            assert len(chosen) == number
            assert {above for node in chosen for above in node.upwards()} == set(chosen)
    counts = [node.counts.num_requests for node in memory.most_used(1000)]
    assert counts == sorted(counts, reverse=True)


def test_with_explanations_off_prefixes_are_counted_and_nothing_else_is_kept() -> None:
    memory = PromptMemory(0, KEY)
    assert memory.add(facts([1] * 20, texts=("a", "b")), SEEN, ("first",), 1.0) is None
    assert (memory.num_prompts, memory.find("ada", "first")) == (0, None)
    (node,) = memory.recent(9)
    assert (node.counts.num_requests, node.marks) == (1, b"")
    rng = Random(4)
    for _ in range(12000):
        memory.add(facts([rng.randrange(999) for _ in range(4)]), SEEN)
    assert memory.num_bytes <= BYTES_WHEN_OFF
    assert memory.num_forgotten_nodes > 0 == memory.num_forgotten


def test_one_that_was_not_served_is_found_by_its_ids_and_compared_with_nothing() -> None:
    memory = PromptMemory(PLENTY, KEY)
    asked = facts(list(range(20)), texts=("a", "b", "c"))
    assert memory.add(asked, None, ("first",), 1.0) is not None
    assert memory.find("ada", "first") is not None
    assert memory.nearest(asked) is None
    assert (memory.num_nodes, known(memory, asked)) == (0, Known(0))


def test_of_branches_within_a_block_the_one_with_most_tokens_in_common_is_nearest() -> None:
    memory = PromptMemory(PLENTY, KEY)
    rests = {"less": [7, 3, 3, 3], "most": [7, 8, 9, 1], "none": [5, 5, 5, 5], "last": [7, 4, 4, 4]}
    for name, rest in rests.items():
        remember(memory, facts([1, 1, 1, 1, *rest]), (name,), 1.0)
    found = memory.nearest(facts([1, 1, 1, 1, 7, 8, 9, 2]))
    assert found is not None and (found.prompt.ids, found.num_common_tokens) == (("most",), 7)
