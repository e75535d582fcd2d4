"""What a replica holds: sequences and tokens, against a slow count of the same."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from replicas.serving.intake import COUNTED_OUTPUT_TOKENS, Intake
from tests.replicas.router_client import submit

WORK = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(1, 3000), st.integers(0, 9)), max_size=40
)


@given(WORK)
def test_what_is_held_is_the_sum_of_what_has_not_ended(work: list[tuple[int, int, int, int]]) -> None:
    intake = Intake(max_sequences=64, max_tokens=20_000)
    sequences: dict[tuple[int, int], int] = {}
    prompts: dict[int, int] = {}
    for number, (num_prompt, num_choices, max_tokens, num_ends) in enumerate(work):
        one = submit(number, range(num_prompt), max_tokens=max_tokens, num_choices=num_choices)
        output = min(max_tokens, COUNTED_OUTPUT_TOKENS)
        fits = (
            len(sequences) + num_choices <= 64
            and sum(sequences.values()) + sum(prompts.values()) + num_prompt + num_choices * output <= 20_000
        )
        assert intake.has_room(one) == (fits or not sequences)
        if intake.has_room(one):
            intake.take(number, one)
            prompts[number] = num_prompt
            sequences |= {(number, choice): output for choice in range(num_choices)}
        for key in list(sequences)[:num_ends]:
            intake.end_sequence(key[0])
            del sequences[key]
            if not any(serial == key[0] for serial, _ in sequences):
                del prompts[key[0]]
        assert intake.num_sequences == len(sequences)
        assert intake.num_tokens == sum(sequences.values()) + sum(prompts.values())


def test_a_request_that_is_alone_is_never_too_much() -> None:
    intake = Intake(max_sequences=4, max_tokens=10)
    large = submit(1, range(1000), num_choices=128)
    assert intake.has_room(large)
    intake.take(1, large)
    assert not intake.has_room(replace(large, submit_id=2, num_choices=1, packed_tokens=bytes(4)))
