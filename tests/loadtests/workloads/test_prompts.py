import json
from collections.abc import Sequence

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
