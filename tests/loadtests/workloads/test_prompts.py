import json
from collections.abc import Sequence

import pytest

from loadtests.workloads import TraceRequest
from loadtests.workloads.prompts import Prompts

ALPHABET = list(range(300, 364))


def request(*prefix_ids: int, num_input_tokens: int | None = None, key: str | None = None) -> TraceRequest:
    length = 16 * len(prefix_ids) if num_input_tokens is None else num_input_tokens
    return TraceRequest(0.0, length, 9, prefix_ids, "someone", "session", key)


def prompt(prompts: Prompts, asked: TraceRequest) -> Sequence[int]:
    found: Sequence[int] = json.loads(prompts.body(asked))["prompt"]
    return found


def test_equal_ids_give_equal_tokens_and_different_ids_different_ones() -> None:
    prompts = Prompts("toy", 16, 1, ALPHABET)
    first, second = prompt(prompts, request(1, 2, 3)), prompt(prompts, request(1, 2, 4))
    assert len(first) == 48
    assert set(first) <= set(ALPHABET)
    assert first[:32] == second[:32]
    assert first[32:] != second[32:]
    assert prompt(Prompts("toy", 16, 1, ALPHABET), request(1, 2, 3)) == first
    assert prompt(Prompts("toy", 16, 2, ALPHABET), request(1, 2, 3)) != first


def test_a_prompt_has_as_many_tokens_as_the_trace_says() -> None:
    prompts = Prompts("toy", 16, 1, ALPHABET)
    assert len(prompt(prompts, request(1, 2, 3, num_input_tokens=33))) == 33
    assert len(prompt(prompts, request(1, num_input_tokens=1))) == 1


def test_words_stand_for_tokens_where_the_server_takes_no_ids() -> None:
    prompts = Prompts("toy", 16, 1, ["cache", "block", "token"])
    text = json.loads(prompts.body(request(1, 2, num_input_tokens=20)))["prompt"]
    words = text.split(" ")
    assert len(words) == 20
    assert set(words) == {"cache", "block", "token"}


def test_the_body_asks_for_the_traces_answer_with_usage() -> None:
    body = json.loads(Prompts("toy", 16, 1, ALPHABET).body(request(1, key="k")))
    assert body.pop("prompt")
    assert body == {
        "model": "toy",
        "max_tokens": 9,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "someone",
        "prompt_cache_key": "k",
    }
    assert "prompt_cache_key" not in json.loads(Prompts("toy", 16, 1, ALPHABET).body(request(1)))


def test_memory_for_blocks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtests.workloads.prompts.CACHED_BLOCKS", 10)
    prompts = Prompts("toy", 16, 1, ALPHABET)
    first = prompt(prompts, request(0))
    for number in range(100):
        prompts.body(request(number))
    assert len(prompts._blocks) == 10
    assert prompt(prompts, request(0)) == first
