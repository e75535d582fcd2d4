"""Who is blamed for a replica's death, how long that is remembered, and what clears it."""

from collections.abc import Sequence

from router.dispatch.suspects import (
    MAX_FEW,
    STORM_DEATHS,
    STORM_SECONDS,
    Presence,
    PromptDigest,
    Standing,
    Suspects,
    blamed,
)

KEY = b"k" * 32
A, B = PromptDigest(b"a"), PromptDigest(b"b")


def here(num_tokens_out: int = 0, num_uncached_tokens: int = 100, *, on_trial: bool = False) -> Presence:
    return Presence(num_uncached_tokens, num_tokens_out, on_trial)


def blame(suspects: Suspects, digests: Sequence[PromptDigest], now: float, *, heard: bool = True) -> None:
    suspects.blame([(digest, heard) for digest in digests], now)


def test_who_was_new_is_blamed_and_who_ran_is_not() -> None:
    assert blamed([here(50), here(0), here(3), here(4)], 0) == [1, 2]


def test_who_was_on_trial_is_blamed_alone() -> None:
    assert blamed([here(0), here(0, on_trial=True), here(1)], 0) == [1]


def test_who_had_survived_its_trial_is_not_blamed_for_having_been_on_one() -> None:
    assert blamed([here(0), here(9, on_trial=True)], 0) == [0]


def test_who_cannot_have_been_in_the_last_steps_is_not_blamed() -> None:
    waiting = [here(num_uncached_tokens=100) for _ in range(1000)]
    assert blamed(waiting, 256) == list(range(6))
    assert blamed([here(2), *waiting], 256) == list(range(7))
    assert blamed([here(num_uncached_tokens=100_000), *waiting], 256) == [0]


def test_where_nobody_was_new_a_few_are_blamed_and_many_are_not() -> None:
    assert blamed([here(50)] * MAX_FEW, 0) == list(range(MAX_FEW))
    assert blamed([here(50)] * (MAX_FEW + 1), 0) == []
    assert blamed([], 0) == []


def test_two_deaths_condemn_and_one_does_not() -> None:
    suspects = Suspects(KEY)
    blame(suspects, [A, A], 0.0)
    assert suspects.standing(A, 1.0) is Standing.SUSPECT
    blame(suspects, [A], 1.0)
    assert suspects.standing(A, 2.0) is Standing.CONDEMNED
    assert suspects.standing(B, 2.0) is Standing.CLEAR


def test_deaths_before_the_replica_had_the_prompt_count_half() -> None:
    suspects = Suspects(KEY)
    for now in (0.0, 1.0, 2.0):
        blame(suspects, [A], now, heard=False)
        assert suspects.standing(A, now) is Standing.SUSPECT
    blame(suspects, [A], 3.0, heard=False)
    assert suspects.standing(A, 3.0) is Standing.CONDEMNED


def test_of_copies_in_flight_the_one_that_the_replica_had_counts() -> None:
    suspects = Suspects(KEY)
    for now in (0.0, 1.0):
        suspects.blame([(A, True), (A, False)], now)
    assert suspects.standing(A, 1.0) is Standing.CONDEMNED


def test_surviving_clears() -> None:
    suspects = Suspects(KEY)
    blame(suspects, [A], 0.0)
    suspects.survived(A)
    blame(suspects, [A], 1.0)
    assert suspects.standing(A, 1.0) is Standing.SUSPECT


def test_all_is_forgotten_after_a_while() -> None:
    suspects = Suspects(KEY, seconds=10.0)
    blame(suspects, [A], 0.0)
    blame(suspects, [A], 5.0)
    assert suspects.remaining_seconds(A, 6.0) == 9.0
    assert suspects.standing(A, 15.0) is Standing.CLEAR
    assert not suspects.has_any


def test_in_a_storm_of_other_deaths_it_takes_three() -> None:
    suspects = Suspects(KEY)
    for _ in range(STORM_DEATHS):
        suspects.blame([], 0.0)
    blame(suspects, [A], 1.0)
    blame(suspects, [A], 2.0)
    assert suspects.standing(A, 2.0) is Standing.SUSPECT
    blame(suspects, [A], 3.0)
    assert suspects.standing(A, 3.0) is Standing.CONDEMNED


def test_deaths_that_a_prompt_explains_are_no_storm_and_old_ones_are_none_either() -> None:
    suspects = Suspects(KEY)
    for _ in range(STORM_DEATHS):
        suspects.blame([], 0.0)
    now = STORM_SECONDS + 1.0
    for number in range(20):
        digest = PromptDigest(bytes([number]))
        blame(suspects, [digest], now)
        blame(suspects, [digest], now)
        assert suspects.standing(digest, now) is Standing.CONDEMNED


def test_memory_is_bounded() -> None:
    suspects = Suspects(KEY, max_remembered=10)
    blame(suspects, [PromptDigest(bytes([number])) for number in range(50)], 0.0)
    assert suspects.num_remembered == 10


def test_digests_depend_on_tokens_model_owner_and_key_alone() -> None:
    digest = Suspects(KEY).digest("m", [1, 2, 3])
    assert Suspects(KEY).digest("m", (1, 2, 3)) == digest
    others = {
        Suspects(b"x" * 32).digest("m", [1, 2, 3]),
        Suspects(KEY).digest("n", [1, 2, 3]),
        Suspects(KEY).digest("m", [1, 2, 4]),
        Suspects(KEY).digest("m", [1, 2, 3], "tenant:acme"),
        Suspects(KEY).digest("m", [1, 2, 3], "tenant:beta"),
    }
    assert len(others | {digest}) == 6
