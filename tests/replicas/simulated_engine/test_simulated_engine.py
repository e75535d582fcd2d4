"""The simulated engine: its prices and its tokens."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from replicas.config import ReplicaConfig
from replicas.engine import Engine, expand
from replicas.engine_process.build import build_engine
from replicas.protocol.blocks import pack_token_ids
from replicas.protocol.frames import PromptUsage, SamplingParams, StepFrame, Submit
from replicas.protocol.status import ModelCard
from replicas.scheduling.request import Chunk
from replicas.scheduling.step_promise import MOST_TIMES_DECODING
from replicas.simulated_engine.engine import SimulatedEngine
from replicas.simulated_engine.hardware import FREE, HARDWARE, CostModel
from tests.replicas.builders import ROOT, engine_request, request, tokens_of

CARD = ModelCard("m", "f", "simulated", 16, 200, 4096, 1000, (2, 7))
H100 = HARDWARE["h100-8b"].cost


class Naps:
    """A `sleep` that only remembers."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def engine(
    cost: CostModel = FREE,
    naps: Naps | None = None,
    printable: Sequence[int] | None = None,
    max_batched_tokens: int = 512,
    card: ModelCard = CARD,
    slo_tpot: float | None = None,
) -> SimulatedEngine:
    return SimulatedEngine(
        card,
        cost,
        num_blocks=card.num_blocks,
        max_batched_tokens=max_batched_tokens,
        max_running=16,
        max_waiting=64,
        sleep=naps or Naps(),
        printable=printable,
        slo_tpot=slo_tpot,
    )


def run(engine: Engine) -> list[StepFrame]:
    frames = []
    while engine.has_work():
        frames.append(engine.step())
    return frames


def answer(engine: Engine, **fields: Any) -> list[int]:
    num_output_tokens = fields.pop("num_output_tokens", 0)
    num_more_tokens = fields.pop("num_more_tokens", 0)
    engine.add(
        engine_request(
            [100] * (20 + num_more_tokens + num_output_tokens), num_output_tokens=num_output_tokens, **fields
        )
    )
    return tokens_of([delta for frame in run(engine) for delta in frame.deltas], 1)


def test_choices_of_one_submit_share_the_prompt_and_differ_in_their_answers() -> None:
    served = engine()
    submit = Submit(
        1, pack_token_ids(range(100, 150)), SamplingParams(max_tokens=8, seed=5), ROOT, num_choices=3
    )
    for choice in expand(submit, serial=1):
        served.add(choice)
    frames = run(served)
    assert [delta.usage for delta in frames[0].deltas] == [
        PromptUsage(50, 0, 48),
        PromptUsage(50, 48, 0),
        PromptUsage(50, 48, 0),
    ]
    answers = {
        tuple(
            t for frame in frames for delta in frame.deltas if delta.key.choice == i for t in delta.token_ids
        )
        for i in range(3)
    }
    assert len(answers) == 3


@given(seed=st.integers(0, 2**64 - 1))
def test_tokens_depend_on_seed_and_position_alone_and_never_end_the_answer(seed: int) -> None:
    tokens = answer(engine(), seed=seed, max_tokens=40)
    assert len(tokens) == 40
    assert tokens == answer(engine(), seed=seed, max_tokens=40, num_more_tokens=3)
    assert tokens[25:] == answer(engine(), seed=seed, max_tokens=40, num_output_tokens=25)
    assert not {2, 7} & set(tokens) and all(0 <= token < 1000 for token in tokens)
    assert tokens != answer(engine(), seed=(seed + 1) % 2**64, max_tokens=40)
    assert len(set(tokens)) > 20


def test_answers_can_be_kept_to_a_range_of_token_ids() -> None:
    tokens = answer(engine(printable=range(5, 9)), max_tokens=100)
    assert set(tokens) == {5, 6, 8}


@pytest.mark.parametrize("printable", [range(2, 3), range(0), range(990, 1001), range(-1, 5)])
def test_a_range_that_holds_no_valid_answer_is_refused(printable: range) -> None:
    with pytest.raises(ValueError, match="vocabulary of 1000"):
        engine(printable=printable)


def test_answers_of_a_simulated_replica_are_text_without_special_tokens() -> None:
    built, bundle = build_engine(ReplicaConfig(engine="simulated", simulated_hardware="instant"))
    text = Tokenizer.from_buffer(bundle.files["tokenizer.json"]).decode(
        answer(built, max_tokens=3000), skip_special_tokens=False
    )
    assert "<|" not in text
    assert "\ufffd" not in text
    assert text.replace("\n", "").isprintable()


def chunk(start: int, num_tokens: int, *, num_prompt_tokens: int, samples: bool = True) -> Chunk:
    return Chunk(request([1] * num_prompt_tokens), start, num_tokens, samples)


def test_the_card_has_the_role() -> None:
    built, _ = build_engine(ReplicaConfig(engine="simulated", role="decode"))
    assert (built.card.role, built.card.splits_by) == ("decode", "")


def test_a_whole_prompt_costs_what_the_hardware_was_measured_at() -> None:
    for uncached, cached in ((1000, 0), (10, 4000), (8000, 32000), (1, 0)):
        seconds = H100.step_seconds([chunk(cached, uncached, num_prompt_tokens=cached + uncached)])
        assert seconds == pytest.approx(
            0.018 + 3.08e-5 * uncached + 9.4e-10 * uncached * (cached + uncached / 2)
        )


def test_decoding_costs_one_reading_of_the_weights_and_the_context_of_everyone() -> None:
    chunks = [chunk(1000, 1, num_prompt_tokens=1000), chunk(3000, 1, num_prompt_tokens=500)]
    assert H100.step_seconds(chunks) == pytest.approx(7.7e-3 + 7.6e-8 * 4002)


def test_cutting_a_prompt_into_chunks_costs_nothing() -> None:
    whole = H100.step_seconds([chunk(0, 8000, num_prompt_tokens=8000)])
    pieces = [
        H100.step_seconds([chunk(start, 2000, num_prompt_tokens=8000, samples=start == 6000)])
        for start in range(0, 8000, 2000)
    ]
    assert sum(pieces) == pytest.approx(whole)


def test_a_step_with_prefill_and_decode_costs_less_than_both_apart_and_more_than_either() -> None:
    prefill, decode = chunk(0, 500, num_prompt_tokens=500), chunk(2000, 1, num_prompt_tokens=1000)
    both = H100.step_seconds([decode, prefill])
    apart = [H100.step_seconds([prefill]), H100.step_seconds([decode])]
    assert max(apart) < both < sum(apart)


def test_an_empty_step_costs_nothing() -> None:
    assert H100.step_seconds([]) == 0.0


def test_it_sleeps_once_a_step_for_the_steps_price_and_not_at_all_when_instant_or_idle() -> None:
    naps = Naps()
    priced = engine(H100, naps)
    priced.add(engine_request(range(100, 200), max_tokens=3))
    run(priced)
    priced.step()
    assert naps.seconds == pytest.approx(
        [0.018 + 3.08e-5 * 100 + 9.4e-10 * 5000, 7.7e-3 + 7.6e-8 * 101, 7.7e-3 + 7.6e-8 * 102]
    )
    free = Naps()
    run(engine(naps=free))
    assert answer(engine(naps=free), max_tokens=5) and free.seconds == []


def test_a_hit_is_cheaper_than_a_miss() -> None:
    naps = Naps()
    priced = engine(H100, naps)
    for serial in (1, 2):
        priced.add(engine_request(range(100, 500), serial=serial, max_tokens=1))
        run(priced)
    assert naps.seconds[0] - naps.seconds[1] == pytest.approx(
        384 * 3.08e-5 + 9.4e-10 * (400**2 - 16 * 784) / 2
    )


def test_every_hardware_has_a_price_list() -> None:
    measured = {"h100-8b", "h100x4-70b"}
    assert set(HARDWARE) == {*measured, *(f"{name}-soft" for name in measured), "instant"}
    assert FREE.step_seconds([chunk(0, 10, num_prompt_tokens=10)]) == 0.0


@pytest.mark.parametrize("hardware", ["h100-8b", "h100x4-70b", "h100x4-70b-soft"])
@pytest.mark.parametrize("promised", [None, 0.04, 0.06, 0.1])
def test_steps_keep_the_promised_time_while_requests_decode(hardware: str, promised: float | None) -> None:
    """Prompts of 30,000 tokens come: nearly all steps with both keep the time, and use it. Where such prompts
    would take too long in that way, they take as much longer than decoding alone as they may."""
    card, naps = dataclasses.replace(CARD, num_blocks=9000, context_length=100_000), Naps()
    busy = engine(HARDWARE[hardware].cost, naps, card=card, max_batched_tokens=8192, slo_tpot=promised)
    for serial in (1, 2, 3):
        busy.add(engine_request([serial] * 3000, serial=serial, max_tokens=1500))
    seconds: list[float] = []
    decoding = math.inf
    for step in range(400):
        if step % 200 == 50:
            busy.add(engine_request([10 + step] * 30_000, serial=10 + step, max_tokens=200))
        frame = busy.step()
        if frame.num_prefill_tokens and frame.num_decode_tokens and len(frame.deltas) == 3:
            seconds.append(naps.seconds[-1])
        elif len(frame.deltas) == 3:
            decoding = min(decoding, naps.seconds[-1])
    seconds.sort()
    assert len(seconds) >= 4
    if promised is None:
        assert seconds[len(seconds) // 2] > 0.2
    else:
        most = max(promised, (1 + MOST_TIMES_DECODING) * decoding)
        assert seconds[int(0.9 * len(seconds))] <= 1.1 * most
        assert seconds[len(seconds) // 2] >= 0.6 * promised


def test_hardware_that_takes_no_time_has_no_promise_to_keep() -> None:
    instant = engine(FREE, slo_tpot=0.05)
    for serial in (1, 2):
        instant.add(engine_request([serial] * 500, serial=serial, max_tokens=3))
    frames = run(instant)
    assert [frame.num_prefill_tokens for frame in frames][:2] == [512, 488]
