"""Requests that ask for leases: what their usage answers, what the tiers keep, what is told when it went."""

from collections.abc import Sequence

from replicas.engine import EngineRequest
from replicas.protocol.frames import PromptUsage, StepFrame
from replicas.protocol.prefix_leases import (
    LeaseAnswer,
    LeaseBreak,
    LeaseRefusal,
    LeaseTotals,
    PrefixLease,
)
from tests.replicas.builders import FakeModel, engine_request
from tests.replicas.scheduling.stepping import TieredModel
from tests.replicas.scheduling.stepping import model as without_tiers

PROMPT = range(100, 126)
"""Three whole chunks of 8 tokens, and 2 tokens."""


def ask(
    model: FakeModel, tokens: Sequence[int], serial: int, leases: Sequence[tuple[int, int]] = ()
) -> PromptUsage:
    wishes = tuple(PrefixLease(*lease) for lease in leases)
    model.scheduler.add(engine_request(tokens, serial=serial, max_tokens=1, leases=wishes))
    return next(delta.usage for delta in model.run() if delta.usage and delta.key.number == serial)


def flood(model: TieredModel, serial: int, num_prompts: int) -> None:
    """Other prompts, of four chunks each."""
    for number in range(num_prompts):
        start = 130 + (serial + number) * 37 % 800
        ask(model, [(start + position * 3) % 800 + 130 for position in range(32)], serial + number)


def test_what_is_leased_outlasts_many_times_the_tiers() -> None:
    model = TieredModel(num_blocks=10, host_chunks=8, lease_share=0.5)
    assert ask(model, PROMPT, 1, [(6, 600)]).leases == (LeaseAnswer(600, 24),)
    flood(model, 2, 30)
    back = ask(model, PROMPT, 99)
    assert (back.num_cached_tokens, back.num_slower_tier_tokens) == (24, 24)
    assert back.leases == () and back.num_evicted_early_tokens == 0


def test_a_lease_covers_whole_chunks_of_the_prompt_and_no_more() -> None:
    model = TieredModel(num_blocks=10, lease_share=0.5)
    answers = ask(model, PROMPT, 1, [(100, 60), (5, 60), (1, 60)]).leases
    assert answers == (
        LeaseAnswer(60, 24),
        LeaseAnswer(60, 16),
        LeaseAnswer(refusal=LeaseRefusal.NO_WHOLE_CHUNK),
    )


def test_refusals_say_why() -> None:
    model = TieredModel(num_blocks=10, host_chunks=4, lease_share=0.5)
    wishes = [(6, 60), (4, 86_400), (4, 10**9), (2, 60)]
    assert [answer.refusal for answer in ask(model, PROMPT, 1, wishes).leases] == [
        LeaseRefusal.BUDGET,
        LeaseRefusal.NO_TIER,
        LeaseRefusal.TOO_LONG,
        None,
    ]


def test_where_nothing_lies_below_the_device_nothing_is_kept() -> None:
    refused = LeaseAnswer(refusal=LeaseRefusal.NO_TIER)
    assert ask(without_tiers(), PROMPT, 1, [(6, 60), (6, 600)]).leases == (refused, refused)


def test_the_choices_of_one_request_ask_once() -> None:
    model = TieredModel(num_blocks=30, lease_share=0.5)
    first = engine_request(PROMPT, serial=1, max_tokens=1, num_choices=3, leases=(PrefixLease(6, 60),))
    for choice in range(3):
        key = first.key._replace(choice=choice)
        model.scheduler.add(EngineRequest(key, first.submit, first.token_ids))
    answers = [delta.usage.leases for delta in model.step().deltas if delta.usage]
    assert sorted(map(len, answers)) == [0, 0, 1]
    assert model.store.directory.leases.counts.granted == 1


def test_a_miss_of_what_was_leased_says_that_it_went_before_its_time() -> None:
    model = TieredModel(num_blocks=10, host_chunks=4, lease_share=1.0)
    ask(model, PROMPT, 1, [(6, 600)])
    flood(model, 2, 1)
    directory = model.store.directory
    held = [key for key in directory._chunks if not directory.leases.holds(key)]
    model.store.pin(held)
    flood(model, 50, 4)
    model.store.unpin(held)
    missed = ask(model, PROMPT, 99)
    assert missed.num_evicted_early_tokens == missed.num_prompt_tokens // 8 * 8 - missed.num_cached_tokens
    assert missed.num_evicted_early_tokens > 0 and missed.broken_by is LeaseBreak.HOST_FULL
    flood(model, 100, 1)
    assert ask(model, PROMPT, 199).broken_by is None


def test_a_frame_brings_the_totals_when_they_have_changed() -> None:
    model = TieredModel(num_blocks=10, lease_share=0.5)
    request = engine_request(
        PROMPT, serial=1, max_tokens=4, ignore_eos=True, leases=(PrefixLease(6, 9), PrefixLease(1, 9))
    )
    model.scheduler.add(request)
    frames: list[StepFrame] = [model.step() for _ in range(12)]
    totals = [frame.leases for frame in frames if frame.leases is not None]
    refused = {LeaseRefusal.NO_WHOLE_CHUNK: 1}
    assert totals == [
        LeaseTotals(num_granted=1, num_refused=refused, num_leased_tokens=24),
        LeaseTotals(num_granted=1, num_refused=refused, num_kept_tokens=24),
    ]
