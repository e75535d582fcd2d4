import json
from typing import Any

import pytest

from loadtests.workloads import (
    GENERATORS,
    TraceRequest,
    Workload,
    agent,
    chat,
    cross_user,
    ideal_hits,
    mixed,
    no_reuse,
    rag,
)
from loadtests.workloads.chat_bodies import ChatBodies

CHATS = ["cross-user", "chat", "agent", "rag", "no-reuse", "mixed", "documents"]


def bodies_of(workload: Workload, seed: int = 1, **options: Any) -> list[dict[str, Any]]:
    made = ChatBodies("m", workload.block_tokens, seed, **options)
    return [json.loads(made.body(request)) for request in workload.requests]


def words_of(body: dict[str, Any]) -> list[str]:
    """The prompt as words, with the roles where they stand."""
    tools = [tool["function"]["description"] for tool in body.get("tools", [])]
    messages = [f"<{message['role']}> {text_of(message['content'])}" for message in body["messages"]]
    return " ".join([*tools, *messages]).split()


def text_of(content: str | list[dict[str, Any]]) -> str:
    """With as many words for an image as it has tokens at the most."""
    if isinstance(content, str):
        return content
    parts = [part.get("text") or " ".join([part["image_url"]["url"]] * 94) for part in content]
    return "\n\n".join(parts)


def common(one: list[str], other: list[str]) -> int:
    return next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_workload_keeps_to_its_time_and_its_requests_know_whose_they_are(name: str) -> None:
    workload = GENERATORS[name](seed=3, duration_seconds=30.0)
    assert 0 < workload.duration_seconds < 30
    for request in workload.requests:
        assert request.tenant is not None
        assert request.user != request.tenant
        assert sum(message.num_tokens for message in request.messages) == request.num_input_tokens
        assert request.num_input_tokens + request.num_output_tokens < 4096


@pytest.mark.parametrize("name", CHATS)
def test_requests_share_prefix_ids_just_if_they_share_tenant_and_words(name: str) -> None:
    workload = GENERATORS[name](seed=4, duration_seconds=12.0)
    prompts = [words_of(body) for body in bodies_of(workload)]
    for number, request in enumerate(workload.requests):
        for earlier in range(number):
            other = workload.requests[earlier]
            num_ids = common([*map(str, request.prefix_ids)], [*map(str, other.prefix_ids)])
            if request.tenant != other.tenant:
                assert num_ids == 0
            else:
                # Roles count as words; in a block where two prompts part, some words may be the same.
                assert num_ids * workload.block_tokens <= common(prompts[number], prompts[earlier])


def test_a_later_turn_of_a_chat_repeats_the_earlier_ones() -> None:
    for workload in (chat(seed=2), agent(seed=2)):
        last: dict[str, list[str]] = {}
        num_later = 0
        for request, body in zip(workload.requests, bodies_of(workload), strict=True):
            words = words_of(body)
            if earlier := last.get(request.session):
                num_later += 1
                assert words[: len(earlier)] == earlier
                assert len(words) > len(earlier)
            last[request.session] = words
        assert num_later > 10


def test_documents_come_in_varying_order_and_are_shared() -> None:
    workload = rag(seed=1)
    orders = {tuple(message.content for message in request.messages[1:-1]) for request in workload.requests}
    assert len({tuple(sorted(order)) for order in orders}) < len(orders)
    hits = ideal_hits(workload, hit_tokens=16)
    assert 0.2 < hits.token_hit_rate < 0.7


def test_the_control_shares_nothing() -> None:
    workload = no_reuse(seed=1)
    assert ideal_hits(workload, hit_tokens=16).token_hit_rate == 0.0
    prompts = [words_of(body) for body in bodies_of(workload)]
    assert all(
        common(prompt, other) < 16 for number, prompt in enumerate(prompts) for other in prompts[:number]
    )


def test_an_agents_body_has_tools_and_every_result_answers_a_call() -> None:
    workload = agent(seed=1)
    num_results = 0
    for request, body in zip(workload.requests, bodies_of(workload), strict=True):
        assert len(body["tools"]) == 10
        assert body["prompt_cache_key"] == request.prompt_cache_key
        for call, result in zip(body["messages"], body["messages"][1:], strict=False):
            if result["role"] == "tool":
                num_results += 1
                assert call["role"] == "assistant"
                assert [each["id"] for each in call["tool_calls"]] == [result["tool_call_id"]]
    assert num_results > 20


def test_a_standard_body_has_no_fields_but_openais() -> None:
    (body, *_) = bodies_of(cross_user(seed=1), is_standard=True)
    assert not {"cache_salt", "ignore_eos"} & set(body)
    assert body["safety_identifier"]


def test_a_mixed_workload_has_all_kinds_at_about_its_rate() -> None:
    workload = mixed(seed=1, qps=8.0, duration_seconds=120.0)
    kinds: dict[str, int] = {}
    sessions: dict[str, TraceRequest] = {}
    for request in workload.requests:
        assert request.tenant is not None
        kind = request.tenant.rpartition("-")[0]
        kinds[kind] = kinds.get(kind, 0) + 1
        assert sessions.setdefault(request.session, request).tenant == request.tenant
    assert set(kinds) == {"cross-user", "chat", "agent", "rag", "no-reuse"}
    assert len(workload.requests) / 120 == pytest.approx(8, rel=0.25)
    with pytest.raises(ValueError, match="shares"):
        mixed(seed=1, rag_share=0.9)
