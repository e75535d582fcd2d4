"""GrammarMemory: bounded in bytes, in all and for a tenant, whatever comes and goes."""

import random

import pytest

from replicas.grammars.memory import MAX_KEPT, MAX_KEPT_BYTES, MAX_SHARED_TOKENS, GrammarMemory, SharedGrammar

MIB = 1 << 20


def key(number: int) -> tuple[bytes, str]:
    return b"root", str(number)


def test_the_same_grammar_is_there_once_and_stays_for_the_next() -> None:
    memory = GrammarMemory(100 * MIB)
    first, second = memory.take(key(1), b"a", MIB), memory.take(key(1), b"a", MIB)
    assert first is not None and first is second
    assert memory.num_bytes == MIB
    memory.give_back(first)
    memory.give_back(first)
    assert (memory.num_bytes, memory.num_kept_bytes) == (0, MIB)
    assert memory.take(key(1), b"a", MIB) is first
    assert (memory.num_bytes, memory.num_kept_bytes) == (MIB, 0)


def test_a_tenant_has_half_and_who_has_no_name_all() -> None:
    for tenant, most in ((b"a", 5), (b"", 10)):
        memory = GrammarMemory(10 * MIB)
        taken = [memory.take(key(number), tenant, MIB) for number in range(11)]
        assert sum(each is not None for each in taken) == most


def test_after_some_tokens_the_next_gets_it_anew_if_there_is_room() -> None:
    memory = GrammarMemory(2 * MIB)
    first = memory.take(key(1), b"", MIB)
    assert first is not None
    first.num_tokens = MAX_SHARED_TOKENS
    second = memory.take(key(1), b"", MIB)
    assert second is not None and second is not first
    second.num_tokens = MAX_SHARED_TOKENS
    assert memory.take(key(1), b"", MIB) is second
    memory.give_back(first)
    assert memory.num_bytes == MIB and memory.num_kept_bytes == 0


def test_one_that_is_exhausted_is_nobody_elses() -> None:
    memory = GrammarMemory(10 * MIB)
    first = memory.take(key(1), b"", MIB)
    assert first is not None
    memory.exhausted(first)
    memory.exhausted(first)
    assert memory.take(key(1), b"", MIB) is not first
    memory.give_back(first)
    assert memory.num_bytes == MIB


@pytest.mark.parametrize(("quiet_bytes", "flood_bytes"), [(MIB, 2 * MIB), (100 * MIB, MIB), (MIB, 200 * MIB)])
def test_a_tenant_that_keeps_most_loses_its_own(quiet_bytes: int, flood_bytes: int) -> None:
    memory = GrammarMemory(10_000 * MIB)
    quiet = memory.take(key(0), b"quiet", quiet_bytes)
    assert quiet is not None
    memory.give_back(quiet)
    for number in range(1, 2 * MAX_KEPT):
        grammar = memory.take(key(number), b"flood", flood_bytes)
        assert grammar is not None
        memory.give_back(grammar)
    assert memory.take(key(0), b"quiet", quiet_bytes) is quiet
    assert memory.take(key(2 * MAX_KEPT - 1), b"flood", flood_bytes) is grammar, "the latest is kept"


def test_bytes_are_what_is_in_use_and_what_is_kept_is_bounded() -> None:
    rng, memory = random.Random(2), GrammarMemory(1000 * MIB)
    used: list[SharedGrammar] = []
    for _ in range(4000):
        if rng.random() < 0.5:
            number = rng.randrange(60)
            taken = memory.take(key(number), b"ab"[number % 2 :][:1], (1 + number) * MIB)
            if taken is not None:
                taken.num_tokens += rng.randrange(1000)
                used.append(taken)
        elif used:
            grammar = used.pop(rng.randrange(len(used)))
            if rng.random() < 0.1:
                memory.exhausted(grammar)
            memory.give_back(grammar)
        in_use = {id(grammar): grammar.num_bytes for grammar in used}
        assert memory.num_bytes == sum(in_use.values()) <= 1000 * MIB
        kept = [each for each in memory._latest.values() if not each.num_users]
        assert memory.num_kept_bytes == sum(each.num_bytes for each in kept) <= MAX_KEPT_BYTES
        assert len(kept) <= MAX_KEPT
