"""Bodies for vLLM, and what is read from its answers."""

import json

import pytest
from llguidance import LLMatcher

from replicas.engine import RequestRefused
from replicas.protocol.blocks import PublishedBeginning
from replicas.protocol.frames import TokenLogprobs
from replicas.protocol.sampling_defaults import PARAMETERS
from replicas.remote_engine.dialect import Chunk, Delta
from replicas.remote_engine.facts import MOST_CACHE_TOKENS, CacheSizes, ServerModel
from replicas.remote_engine.sglang_dialect import read_sglang
from replicas.remote_engine.vllm_dialect import (
    Logprobs,
    as_lark,
    body_of,
    logprobs_of,
    read_cache_sizes,
    read_chunk,
)
from tests.replicas.builders import ANOTHER_ROOT, ROOT, engine_request

EOS = (2, 5)


def test_every_parameter_reaches_the_server() -> None:
    request = engine_request(
        [7, 8, 9],
        max_tokens=11,
        min_tokens=3,
        temperature=0.25,
        top_p=0.5,
        top_k=4,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.75,
        frequency_penalty=-0.5,
        seed=2**64 - 1,
        is_seeded=True,
        logit_bias=((6, 1.5),),
        stop_token_ids=(77,),
        num_logprobs=2,
        priority=-3,
        adapter="tuned",
    )
    assert body_of(request, "4-0", "served", EOS) == {
        "model": "tuned",
        "prompt": [7, 8, 9],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": ROOT.hex(),
        "session_id": "4-0",
        "priority": -3,
        "max_tokens": 11,
        "min_tokens": 3,
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.75,
        "frequency_penalty": -0.5,
        "seed": 2**63 - 1,
        "stop_token_ids": [2, 5, 77],
        "ignore_eos": True,
        "logit_bias": {"6": 1.5},
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
    }


def test_a_resumed_request_asks_for_what_is_left() -> None:
    request = engine_request(
        [7, 8, 9], max_tokens=11, min_tokens=3, seed=5, is_seeded=True, num_output_tokens=2
    )
    body = body_of(request, "4-0", "served", EOS)
    assert (body["max_tokens"], body["min_tokens"], body["model"]) == (9, 1, "served")
    assert body["seed"] != 5


def test_only_a_clients_seed_is_sent() -> None:
    assert "seed" not in body_of(engine_request([7], seed=5), "4-0", "served", EOS)
    assert body_of(engine_request([7], seed=5, is_seeded=True), "4-0", "served", EOS)["seed"] == 5


def test_without_an_end_only_the_stop_tokens_end_it() -> None:
    request = engine_request([7], ignore_eos=True, stop_token_ids=(77,))
    assert body_of(request, "4-0", "served", EOS)["stop_token_ids"] == [77]


def test_published_beginnings_are_refused() -> None:
    request = engine_request([7], published=PublishedBeginning(ANOTHER_ROOT, 1))
    with pytest.raises(RequestRefused, match="one namespace"):
        body_of(request, "4-0", "served", EOS)


def test_a_grammar_of_parts_becomes_one_that_llguidance_reads() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    parts = [
        {"name": "answer", "lark_grammar": 'start: "to x@text" @text | @choice\n'},
        {"name": "text", "json_schema": schema},
        {"name": "choice", "lark_grammar": 'start: one | "b"\none: "a"\n'},
    ]
    lark = as_lark(json.dumps({"grammars": parts}))
    assert '"to x@text" part_0 | part_1' in lark
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(lark))


def test_a_part_in_another_notation_is_refused() -> None:
    parts = [{"name": "answer", "lark_grammar": "start: @text\n"}, {"name": "text", "regex": "a"}]
    with pytest.raises(RequestRefused):
        as_lark(json.dumps({"grammars": parts}))


def test_the_likeliest_tokens_come_first() -> None:
    found = Logprobs(["token_id:7"], [-0.5], [{"token_id:8": -2.0, "token_id:7": -0.5, "token_id:9": -1.0}])
    assert logprobs_of(found, 2) == (TokenLogprobs(7, -0.5, ((7, -0.5), (9, -1.0))),)
    assert logprobs_of(replace_tops(found), 0) == (TokenLogprobs(7, -0.5, ()),)


def replace_tops(found: Logprobs) -> Logprobs:
    return Logprobs(found.tokens, found.token_logprobs)


def test_a_cache_that_cannot_be_is_believed_in_part(caplog: pytest.LogCaptureFixture) -> None:
    for claimed, believed in (("1000001", 1_000_000), ("1000000000", 2**21)):
        labels = f'block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="{claimed}"'
        assert read_cache_sizes(f"vllm:cache_config_info{{{labels}}} 1.0\n", 0) == CacheSizes(
            16, believed, 16
        )
        assert ("are believed" in caplog.text) == (believed == 2**21)
    info = {"max_total_num_tokens": 10**12}
    model = ServerModel("served", "/models/toy", 512, ())
    sizes = read_sglang(info, model, "http://a", rank=None, block_size=None).sizes
    assert sizes.num_blocks * sizes.block_size == MOST_CACHE_TOKENS


@pytest.mark.parametrize("tokens", [["hello"], ["token_id:x"], ["token_id:7", "token_id:8"]])
def test_logprobs_that_are_none_are_found_out(tokens: list[str]) -> None:
    with pytest.raises(ValueError):
        logprobs_of(Logprobs(tokens, [-0.5]), 1)


def test_a_chunk_is_read_with_what_it_does_not_need() -> None:
    chunk = read_chunk(
        None,
        b'{"id": "a", "choices": [{"text": "x", "token_ids": [4], "prompt_token_ids": [1]}]}',
    )
    assert chunk == Chunk([Delta((4,))])
    usage = read_chunk(None, b'{"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": null}}')
    assert usage == Chunk([])


def test_what_nobody_said_is_left_to_the_server() -> None:
    said = body_of(engine_request([7], temperature=1.0), "4-0", "served", EOS)
    unsaid = body_of(engine_request([7], temperature=1.0, unsaid=PARAMETERS[1:]), "4-0", "served", EOS)
    assert {name for name in said if name not in unsaid} == {*PARAMETERS[1:]}
    assert unsaid["temperature"] == 1.0
    hostile = engine_request([7], unsaid=("cache_salt", "prompt", "max_tokens"))
    assert body_of(hostile, "4-0", "served", EOS) == body_of(engine_request([7]), "4-0", "served", EOS)
