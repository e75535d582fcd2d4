"""SGLang as an engine, by a stand-in that speaks as its sources do: bodies, answers, pages, faults."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from replicas.engine import RequestRefused
from replicas.errors import StartupError
from replicas.protocol.blocks import hash_blocks
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored
from replicas.protocol.frames import FinishReason, RefusalCode, UserTag
from replicas.protocol.sampling_defaults import PARAMETERS, SamplingDefaults
from replicas.remote_engine.dialect import Chunk, Delta
from replicas.remote_engine.engine import RemoteEngine
from replicas.remote_engine.facts import CacheSizes, EventSource, ServerModel
from replicas.remote_engine.sglang_dialect import SglangDialect, read_sglang
from router.answers.formats import AnswerFormat
from router.answers.grammars import grammar_for
from router.answers.wishes import FormatKind, OutputFormat, ToolChoice, ToolMode
from tests.replicas.builders import ROOT, engine_request
from tests.replicas.remote_engine.driven import Driven
from tests.replicas.remote_engine.sglang_stand_in import NUM_TOKENS, SglangStandIn
from tests.replicas.remote_engine.stand_in import token_of
from tests.replicas.remote_engine.test_engine import config, running

MODEL = ServerModel("served", "/models/toy", 512, ())
INFO = {
    "max_total_num_tokens": 640,
    "page_size": 1,
    "dp_size": 4,
    "startup_time": {"load_weight": 1.5},
    "kv_events": {
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "replay_endpoint_port_base": 6557,
        "topic": "kv",
        "block_size": 1,
        "dp_size": 4,
    },
}
URL = "http://host:30000"
CACHED = {"cached_tokens": 3}


def dialect(rank: int | None = None, **info: object) -> SglangDialect:
    return read_sglang({**INFO, **info}, MODEL, URL, rank=rank, block_size=None)


@pytest.fixture
def driven(sglang: SglangStandIn) -> Iterator[Driven]:
    with running(sglang) as driven:
        yield driven


def test_its_description_becomes_the_facts() -> None:
    found = dialect(rank=2)
    assert found.sizes == CacheSizes(16, 40, 1)
    assert found.source == EventSource("tcp://host:5559", "tcp://host:6559", "kv", binds=True)
    assert dialect(kv_events=None, page_size=64).sizes == CacheSizes(64, 10, 64)
    assert dialect(kv_events=None).source is None
    assert read_sglang(INFO, MODEL, URL, rank=None, block_size=32).sizes == CacheSizes(32, 20, 1)


@pytest.mark.parametrize(
    ("info", "rank", "sentence"),
    [
        ({"disable_radix_cache": True}, None, "without --disable-radix-cache"),
        ({"max_total_num_tokens": 3}, None, "its cache has 3 tokens"),
        ({"max_total_num_tokens": "many"}, None, "cannot be read"),
        ({}, 4, "no rank 4: it has 4"),
    ],
)
def test_a_description_that_cannot_be_served(
    info: dict[str, object], rank: int | None, sentence: str
) -> None:
    with pytest.raises(StartupError, match=sentence):
        dialect(rank, **info)
    with pytest.raises(StartupError, match="pages have 64 tokens"):
        read_sglang({**INFO, "kv_events": None, "page_size": 64}, MODEL, URL, rank=None, block_size=32)


def test_every_parameter_reaches_the_server() -> None:
    request = engine_request(
        [7, 8, 9],
        max_tokens=11,
        min_tokens=3,
        temperature=0.25,
        top_p=0.5,
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
    assert dialect(1, enable_priority_scheduling=True).body(request, "4-0", (2, 5)) == {
        "input_ids": [7, 8, 9],
        "rid": "4-0",
        "session_id": "4-0",
        "stream": True,
        "cache_salt": ROOT.hex(),
        "lora_path": "tuned",
        "routed_dp_rank": 1,
        "priority": 3,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "sampling_params": {
            "max_new_tokens": 11,
            "min_new_tokens": 3,
            "temperature": 0.25,
            "top_p": 0.5,
            "top_k": -1,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "presence_penalty": 0.75,
            "frequency_penalty": -0.5,
            "sampling_seed": 2**63 - 1,
            "stop_token_ids": [2, 5, 77],
            "ignore_eos": False,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "logit_bias": {"6": 1.5},
        },
    }
    low_first = dialect(enable_priority_scheduling=True, schedule_low_priority_values_first=True)
    assert low_first.body(request, "4-0", ())["priority"] == -3
    assert "priority" not in dialect().body(request, "4-0", ())


def test_what_nobody_said_is_left_to_the_server() -> None:
    body = dialect().body(engine_request([7], top_k=0, unsaid=("temperature", "top_p")), "4-0", ())
    parameters = body["sampling_params"]
    assert not {"temperature", "top_p"} & {*parameters}
    assert (parameters["top_k"], parameters["min_p"]) == (-1, 0.0)
    left = dialect().body(engine_request([7], unsaid=PARAMETERS), "4-0", ())["sampling_params"]
    assert not {*PARAMETERS} & {*left} and left["max_new_tokens"] == engine_request([7]).sampling.max_tokens


def test_what_it_does_not_take_is_refused() -> None:
    with pytest.raises(RequestRefused, match="together with ignore_eos"):
        dialect().body(engine_request([7], ignore_eos=True, stop_token_ids=(77,)), "4-0", ())


def test_a_json_schema_of_a_client_is_taken_and_no_other_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammars = [
        grammar_for(wish, [], ToolChoice(ToolMode.NONE), AnswerFormat())
        for wish in (
            OutputFormat(FormatKind.JSON_SCHEMA, schema),
            OutputFormat(FormatKind.JSON_OBJECT),
            OutputFormat(FormatKind.REGEX, text="a+"),
        )
    ]
    sent = dialect().body(engine_request([7], grammar=grammars[0]), "4-0", ())["sampling_params"]
    assert json.loads(sent["json_schema"])["properties"]["a"] == {"type": "integer"}
    assert (
        "json_schema"
        in dialect().body(engine_request([7], grammar=grammars[1]), "4-0", ())["sampling_params"]
    )
    with pytest.raises(RequestRefused, match="no other grammar"):
        dialect().body(engine_request([7], grammar=grammars[2]), "4-0", ())


@pytest.mark.parametrize("is_incremental", [False, True])
def test_an_answer_is_read_once_however_often_it_is_repeated(is_incremental: bool) -> None:
    read = dialect(incremental_streaming_output=is_incremental).reader(engine_request([7]))
    outputs = ([4], [5, 6], [7]) if is_incremental else ([4], [4, 5, 6], [4, 5, 6, 7])
    finishes = (None, None, {"type": "stop", "matched": 7})
    found = [
        read(json.dumps({"output_ids": ids, "meta_info": {"finish_reason": end, **CACHED}}).encode())
        for ids, end in zip(outputs, finishes, strict=True)
    ]
    assert found == [
        Chunk((Delta((4,)),), 3),
        Chunk((Delta((5, 6)),), 3),
        Chunk((Delta((7,), FinishReason.STOP),), 3),
    ]
    if not is_incremental:
        with pytest.raises(ValueError, match="1 tokens, after 4"):
            read(b'{"output_ids": [4], "meta_info": {}}')


def test_pages_of_a_draft_model_are_complained_of(sglang: SglangStandIn) -> None:
    raw = msgspec.msgpack.encode(
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [[1, 2]], "block_size": 1}
    )
    sglang.publish_raw(b"\x93\xcb" + bytes(8) + b"\x91" + raw + b"\x00")
    with running(sglang) as driven:
        driven.step_until(lambda: driven.frame.load.is_predicted)


def test_a_prompt_is_served_and_found_again(driven: Driven, sglang: SglangStandIn) -> None:
    card = driven.engine.card
    size = card.block_size
    assert (size, card.num_blocks) == (max(16, sglang.page_size), NUM_TOKENS // size)
    prompt = list(range(100, 100 + 3 * size + 1))
    key = driven.add(prompt, max_tokens=3, num_logprobs=1, user=UserTag(b"u"))
    last = driven.finish(key)
    assert driven.tokens(key) == [token_of(prompt, number) for number in range(3)]
    assert last.finish_reason is FinishReason.LENGTH and last.usage is not None
    assert last.usage.num_cached_tokens == 0
    logprobs = [entry for delta in driven.deltas[key] for entry in delta.logprobs or ()]
    assert [entry.token_id for entry in logprobs] == driven.tokens(key)
    again = driven.finish(driven.add(prompt, max_tokens=1))
    assert again.usage is not None and again.usage.num_cached_tokens == 3 * size
    driven.step_until(lambda: bool(driven.events))
    stored = [event for event in driven.events if isinstance(event, BlockStored)]
    assert [each for event in stored for each in event.block_hashes] == hash_blocks(ROOT, prompt, size)
    assert not driven.frame.load.is_predicted


def test_prompts_that_part_and_are_evicted_balance(driven: Driven, sglang: SglangStandIn) -> None:
    rng, size = random.Random(5), driven.engine.card.block_size
    beginnings = [[rng.randrange(3, 900) for _ in range(rng.randrange(2 * size))] for _ in range(3)]
    prompts = []
    for _ in range(14):
        rest = [rng.randrange(3, 900) for _ in range(rng.randrange(size, 4 * size))]
        prompts.append((rng.choice(beginnings) + rest)[:500])
    sglang.capacity = 20 * size
    for _ in range(50):
        assert driven.finish(driven.add(rng.choice(prompts), max_tokens=1)).refusal is None
    driven.step_until(lambda: not driven.engine.has_work())
    assert any(isinstance(event, BlockRemoved) for event in driven.events)
    held = sglang.whole_blocks(prompts, size)
    assert {each for each, number in driven.balance.held.items() if number} == held
    assert set(driven.balance.held.values()) <= {0, 1}
    sglang.publish({"type": "AllBlocksCleared"})
    driven.step_until(lambda: AllBlocksCleared() in driven.events)


@pytest.mark.parametrize(
    ("fault", "code", "sentence"),
    [
        ("full", RefusalCode.OVERLOADED, "too many requests"),
        ("fails", RefusalCode.INTERNAL, "answers 500"),
        ("breaks off", RefusalCode.INTERNAL, "breaks off"),
        ("error inside", RefusalCode.INTERNAL, "out of memory"),
        ("bad request", RefusalCode.INVALID_REQUEST, "too long"),
        ("aborts", RefusalCode.OVERLOADED, "the queue is full"),
    ],
)
@pytest.mark.parametrize("sglang", [16], indirect=True)
def test_a_fault_ends_one_request_and_no_other(
    driven: Driven, sglang: SglangStandIn, fault: str, code: RefusalCode, sentence: str
) -> None:
    sglang.fault = fault
    last = driven.finish(driven.add([5] * 40, max_tokens=3))
    assert last.finish_reason is FinishReason.ERROR and last.refusal is not None
    assert last.refusal.code is code and sentence in last.refusal.message
    for fault in ("", "no end"):  # its last event is missing, and all its tokens are there
        sglang.fault = fault
        assert driven.finish(driven.add([5] * 40, max_tokens=3)).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("sglang", [16], indirect=True)
def test_load_and_another_start_are_noticed(driven: Driven, sglang: SglangStandIn) -> None:
    driven.step_until(lambda: driven.frame.load.num_running == 2)
    assert driven.frame.load.num_waiting == 1
    sglang.started_at += 1
    driven.dies("started anew")


@pytest.mark.parametrize("sglang", [16], indirect=True)
def test_without_events_it_is_predicted(sglang: SglangStandIn, caplog: pytest.LogCaptureFixture) -> None:
    sglang.has_events = False
    with running(sglang) as driven:
        assert "start SGLang with --kv-events-config" in caplog.text
        driven.finish(driven.add(list(range(100, 150)), max_tokens=1))
        assert driven.balance.held.total() == 3 and driven.frame.load.is_predicted


@pytest.mark.parametrize("told", ["model", "openai"])
def test_a_models_file_counts_unless_the_server_has_turned_it_off(
    sglang: SglangStandIn, model_that_says: Path, told: str
) -> None:
    sglang.info["sampling_defaults"] = told
    engine = RemoteEngine(config(sglang, model=str(model_that_says)))
    expected = SamplingDefaults(temperature=0.25, max_new_tokens=9)
    assert engine.card.sampling_defaults == (expected if told == "model" else SamplingDefaults())
    engine.close()
