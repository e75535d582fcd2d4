"""What a scheduler refuses outright, with which code, and that it then keeps nothing."""

from math import inf, nan
from typing import Any

import pytest

from replicas.engine import RequestRefused
from replicas.protocol.blocks import ImageTokens
from replicas.protocol.frames import RefusalCode, RequestKey
from tests.replicas.builders import FakeModel, engine_request, scheduler

LIMITS: dict[str, Any] = {"num_blocks": 11, "block_size": 4, "context_length": 30, "vocab_size": 100}


def refusal(token_ids: list[int], limits: dict[str, Any] | None = None, **fields: Any) -> RequestRefused:
    target = scheduler(**(LIMITS | (limits or {})))
    with pytest.raises(RequestRefused) as refused:
        target.add(engine_request(token_ids, **fields))
    assert not target.has_work()
    assert target.load().num_waiting == 0
    return refused.value


def test_an_empty_prompt_is_refused() -> None:
    assert refusal([]).code is RefusalCode.INVALID_REQUEST
    assert refusal([5, 6], num_output_tokens=2).message == "the prompt is empty"


def test_an_adapter_is_refused_by_an_engine_that_has_none() -> None:
    target = scheduler(**LIMITS)
    with pytest.raises(RequestRefused) as refused:
        target.add(engine_request([5], adapter="tuned"))
    assert refused.value.code is RefusalCode.INVALID_REQUEST
    assert refused.value.message == "there is no adapter 'tuned'; this replica has none"
    assert not target.has_work()


@pytest.mark.parametrize("token_id", [-1, 100, 2**40])
def test_a_token_outside_the_vocabulary_is_refused(token_id: int) -> None:
    refused = refusal([1, token_id, 3])
    assert refused.code is RefusalCode.INVALID_REQUEST
    assert refused.message == f"token id {token_id} is outside the vocabulary of 100"


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused() -> None:
    refused = refusal([1] * 30)
    assert refused.code is RefusalCode.CONTEXT_LENGTH_EXCEEDED
    assert "30 tokens" in refused.message and "29" in refused.message
    fits = scheduler(**LIMITS)
    fits.add(engine_request([1] * 29))
    assert len(FakeModel(fits).run()) == 1


def test_a_prompt_that_the_whole_cache_cannot_hold_is_refused() -> None:
    refused = refusal([1] * 41, {"context_length": 1000})
    assert refused.code is RefusalCode.CONTEXT_LENGTH_EXCEEDED
    assert "41 tokens" in refused.message and "holds 40" in refused.message
    fits = scheduler(**(LIMITS | {"context_length": 1000}))
    fits.add(engine_request([1] * 40))
    assert len(FakeModel(fits).run()) == 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"min_tokens": -1},
        {"max_tokens": 3, "min_tokens": 4},
        {"temperature": -0.1},
        {"temperature": nan},
        {"temperature": inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": nan},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": nan},
        {"presence_penalty": nan},
        {"frequency_penalty": inf},
        {"logit_bias": ((5, nan),)},
        {"logit_bias": ((5, inf),)},
        {"logit_bias": ((100, 1.0),)},
        {"logit_bias": ((-1, 1.0),)},
        {"num_logprobs": -1},
        {"num_logprobs": 101},
    ],
    ids=str,
)
def test_sampling_parameters_that_would_break_a_sampler_are_refused(sampling: dict[str, Any]) -> None:
    refused = refusal([1, 2, 3], **sampling)
    assert refused.code is RefusalCode.INVALID_REQUEST
    assert any(name in refused.message for name in sampling)


def test_extreme_but_sound_sampling_parameters_are_taken() -> None:
    target = scheduler(**LIMITS)
    target.add(
        engine_request(
            [1],
            max_tokens=2**31 - 1,
            min_p=1.0,
            top_k=10**9,
            logit_bias=((99, -inf), (0, -100.0)),
            num_logprobs=100,
            stop_token_ids=(10**6,),
        )
    )
    assert target.has_work()


@pytest.mark.parametrize("span", [ImageTokens(b"x", -1, 2), ImageTokens(b"x", 0, 0), ImageTokens(b"x", 2, 2)])
def test_media_outside_the_prompt_are_refused(span: ImageTokens) -> None:
    assert refusal([1, 2, 3], media=(span,)).code is RefusalCode.INVALID_REQUEST


@pytest.mark.parametrize("num_output_tokens", [-1, 4])
def test_output_that_the_tokens_cannot_contain_is_refused(num_output_tokens: int) -> None:
    refused = refusal([1, 2, 3], num_output_tokens=num_output_tokens, max_tokens=20)
    assert "cannot be output" in refused.message


def test_resuming_what_is_complete_already_is_refused() -> None:
    refused = refusal([1, 2, 3], num_output_tokens=2, max_tokens=2)
    assert refused.code is RefusalCode.INVALID_REQUEST
    assert refused.message == "all 2 tokens of max_tokens are there already"


def test_a_key_that_is_in_use_is_refused_and_its_first_holder_goes_on() -> None:
    target = scheduler(**LIMITS)
    target.add(engine_request([1, 2, 3], max_tokens=2))
    with pytest.raises(RequestRefused, match="already here") as refused:
        target.add(engine_request([4, 5, 6]))
    assert refused.value.code is RefusalCode.INVALID_REQUEST
    assert len(FakeModel(target).run()) == 2
    target.add(engine_request([4, 5, 6]))


def test_more_waiting_requests_than_allowed_are_refused_as_overloaded() -> None:
    target = scheduler(**(LIMITS | {"max_waiting": 2}))
    for serial in (1, 2):
        target.add(engine_request([serial], serial=serial))
    with pytest.raises(RequestRefused) as refused:
        target.add(engine_request([3], serial=3))
    assert refused.value.code is RefusalCode.OVERLOADED
    target.abort(RequestKey(1, 0))
    target.add(engine_request([3], serial=3))
    FakeModel(target).step()
    target.add(engine_request([4], serial=4))
