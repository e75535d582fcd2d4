import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.workloads import (
    GENERATORS,
    IdealHits,
    TraceRequest,
    Workload,
    agentic,
    b2b,
    coding_agents,
    ideal_hits,
    key_per_request,
    multi_turn,
    one_key,
    one_large_tenant,
    same_head,
    short_prompts,
    shrink,
    zipf_b2b,
)
from loadtests.workloads.generators import PrefixIds


def expand(workload: Workload) -> list[list[tuple[int, int]]]:
    """Every prompt token by token: block id and position in it."""
    return [
        [
            (request.prefix_ids[position // workload.block_tokens], position % workload.block_tokens)
            for position in range(request.num_input_tokens)
        ]
        for request in workload.requests
    ]


def slow_ideal_hits(workload: Workload, hit_tokens: int) -> IdealHits:
    """Compares every prompt with every earlier one, token by token."""
    prompts = expand(workload)
    num_cached = num_cross_user = 0
    for number, prompt in enumerate(prompts):
        writers: list[str] = []
        for position in range(len(prompt)):
            owner = next(
                (
                    earlier
                    for earlier in range(number)
                    if prompts[earlier][: position + 1] == prompt[: position + 1]
                ),
                None,
            )
            if owner is None:
                break
            writers.append(workload.requests[owner].user)
        num_hit = min(len(writers), len(prompt) - 1) // hit_tokens * hit_tokens
        num_cached += num_hit
        num_cross_user += sum(user != workload.requests[number].user for user in writers[:num_hit])
    total = workload.num_input_tokens
    return IdealHits(num_cached / total, num_cross_user / total)


@st.composite
def small_workloads(draw: st.DrawFn) -> Workload:
    block_tokens = draw(st.integers(1, 6))
    ids = PrefixIds(block_tokens)
    requests = []
    for number in range(draw(st.integers(1, 6))):
        names = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=4))
        segments = [(name, {"a": 2, "b": 5, "c": 7}[name]) for name in names]
        requests.append(
            TraceRequest(
                arrival_seconds=number,
                num_input_tokens=sum(num_tokens for _, num_tokens in segments),
                num_output_tokens=1,
                prefix_ids=ids.chain(segments),
                user=draw(st.sampled_from(["u", "v"])),
                session="s",
            )
        )
    return Workload("small", block_tokens, tuple(requests))


@given(small_workloads(), st.integers(1, 7))
def test_the_ideal_is_what_comparing_all_prompts_finds(workload: Workload, hit_tokens: int) -> None:
    assert ideal_hits(workload, hit_tokens=hit_tokens) == slow_ideal_hits(workload, hit_tokens)


@given(
    st.integers(1, 5),
    st.lists(
        st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6)), min_size=1, max_size=4), max_size=6
    ),
)
def test_equal_ids_stand_for_equal_prefixes_and_only_for_them(
    block_tokens: int, prompts: list[list[tuple[str, int]]]
) -> None:
    ids = PrefixIds(block_tokens)
    meant: dict[int, tuple[tuple[str, int], ...]] = {}
    for segments in prompts:
        tokens = tuple((name, position) for name, length in segments for position in range(length))
        chain = ids.chain(segments)
        assert len(chain) == math.ceil(len(tokens) / block_tokens)
        for number, prefix_id in enumerate(chain):
            prefix = tokens[: (number + 1) * block_tokens]
            assert meant.setdefault(prefix_id, prefix) == prefix
    assert len(set(meant.values())) == len(meant)


def test_b2b_has_the_published_ideal() -> None:
    hits = ideal_hits(b2b(seed=1), hit_tokens=16)
    assert hits.token_hit_rate == pytest.approx(0.956, abs=0.001)
    assert hits.cross_user_hit_rate / hits.token_hit_rate == pytest.approx(0.68, abs=0.005)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_is_seeded_sorted_and_consistent(name: str) -> None:
    fewer = {"num_sessions": 12} if name == "coding-agents" else {}
    workload = GENERATORS[name](seed=5, **fewer)
    assert workload == GENERATORS[name](seed=5, **fewer)
    assert workload != GENERATORS[name](seed=6, **fewer)
    assert workload.name == name
    arrivals = [request.arrival_seconds for request in workload.requests]
    assert arrivals == sorted(arrivals)
    for request in workload.requests:
        assert len(request.prefix_ids) == math.ceil(request.num_input_tokens / workload.block_tokens)
        assert request.num_input_tokens > 0
        assert request.num_output_tokens > 0


@pytest.mark.parametrize("name", ["b2b", "zipf-b2b", "same-head", "short-prompts"])
def test_arrivals_come_at_the_rate_that_was_asked_for(name: str) -> None:
    workload = GENERATORS[name](seed=2, qps=40.0, num_requests=4000)
    assert workload.duration_seconds == pytest.approx(100, rel=0.1)


def test_questions_of_the_zipf_load_are_fresh_and_its_tenants_unequal() -> None:
    workload = zipf_b2b(seed=1, num_requests=2000)
    assert len({request.prefix_ids[-1] for request in workload.requests}) == 2000
    sizes = sorted(
        [
            sum(request.prefix_ids[0] == tenant for request in workload.requests)
            for tenant in {request.prefix_ids[0] for request in workload.requests}
        ],
        reverse=True,
    )
    assert sizes[0] > 5 * sizes[len(sizes) // 2]


def test_a_later_turn_extends_the_earlier_one() -> None:
    for workload in (
        multi_turn(seed=1),
        agentic(seed=1, num_sessions=8),
        coding_agents(seed=1, num_sessions=4),
    ):
        last: dict[str, TraceRequest] = {}
        for request in workload.requests:
            earlier = last.get(request.session)
            if earlier is not None:
                assert request.num_input_tokens > earlier.num_input_tokens
                num_full = earlier.num_input_tokens // workload.block_tokens
                assert request.prefix_ids[:num_full] == earlier.prefix_ids[:num_full]
            last[request.session] = request
        assert len({request.prefix_ids[0] for request in workload.requests}) == 1
        assert len(workload.requests) > 2 * len(last)


def test_coding_agents_have_long_prompts_of_which_next_to_nothing_is_new() -> None:
    workload = coding_agents(seed=1, num_sessions=20)
    sizes = sorted(request.num_input_tokens for request in workload.requests)
    assert sizes[len(sizes) // 2] > 70_000 and sizes[-1] <= 200_000
    sessions = Counter(request.session for request in workload.requests)
    assert all(num_turns <= 46 for num_turns in sessions.values())
    assert sum(num_turns >= 30 for num_turns in sessions.values()) > 15
    assert len({request.prefix_ids[: 15_000 // workload.block_tokens] for request in workload.requests}) == 1
    assert ideal_hits(workload).token_hit_rate > 0.95


def test_the_adversarial_loads_are_what_they_say() -> None:
    head = same_head(seed=1)
    num_head_blocks = 256 // head.block_tokens
    assert len({request.prefix_ids[:num_head_blocks] for request in head.requests}) == 1
    assert len({request.prefix_ids[: num_head_blocks + 1] for request in head.requests}) == 40

    large = one_large_tenant(seed=1)
    first_blocks = [request.prefix_ids[0] for request in large.requests]
    assert max(map(first_blocks.count, set(first_blocks))) / 1000 == pytest.approx(0.6, abs=0.05)

    assert {request.prompt_cache_key for request in one_key(seed=1).requests} == {"the key"}
    assert len({request.prompt_cache_key for request in key_per_request(seed=1).requests}) == 1000
    assert ideal_hits(key_per_request(seed=1)).cross_user_hit_rate > 0.5
    assert {request.num_input_tokens for request in short_prompts(seed=1).requests} == {
        1,
        17,
        100,
        255,
        256,
        257,
    }


@pytest.mark.parametrize("factor", [0.004, 0.05, 0.1, 0.5, 1.0])
def test_shrinking_keeps_who_shares_what(factor: float) -> None:
    workload = multi_turn(seed=1, num_sessions=5, block_tokens=512)
    small = shrink(workload, factor)
    for before, after in zip(workload.requests, small.requests, strict=True):
        assert after.prefix_ids == before.prefix_ids
        assert math.ceil(after.num_input_tokens / small.block_tokens) == len(after.prefix_ids)
        assert after.num_input_tokens == pytest.approx(
            before.num_input_tokens * factor, rel=0.1, abs=len(after.prefix_ids)
        )
    assert shrink(workload, 1.0) == workload


def test_warm_up_fills_the_cache_and_is_not_counted() -> None:
    request = TraceRequest(0, 32, 1, (1, 2), "u", "s")
    workload = Workload("w", 16, (request, request))
    assert ideal_hits(workload).token_hit_rate == 16 / 64
    assert ideal_hits(workload, warm_up=1).token_hit_rate == 16 / 32
