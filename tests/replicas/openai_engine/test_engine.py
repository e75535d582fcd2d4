"""A server of bodies as an engine: what it serves, and what becomes of each of its faults."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from replicas.config import ReplicaConfig
from replicas.engine import RequestRefused
from replicas.errors import EngineDied, StartupError
from replicas.openai_engine import upstream
from replicas.openai_engine.engine import OpenAiEngine
from replicas.process.settings import SettingsError
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.frames import BodyForm, FinishReason, RefusalCode, RequestKey
from tests.replicas.builders import ROOT, engine_request
from tests.replicas.openai_engine.route_server import RouteServer
from tests.replicas.openai_engine.text_server import TextServer
from tests.replicas.remote_engine.driven import WAIT_SECONDS
from tests.replicas.remote_engine.driven import Driven as Base

WORDS = " ".join(f"w{number}" for number in range(100))


def config(server: TextServer | RouteServer, **settings: Any) -> ReplicaConfig:
    defaults = {"engine_url": server.url, "engine_hang_seconds": 1.0, "build_seconds": 20.0}
    return ReplicaConfig(engine="openai", **{**defaults, **settings})


def chat(text: str = WORDS, **fields: Any) -> bytes:
    body = {"model": "wordy", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
    return json.dumps(body).encode()


class Driven(Base):
    """The tokens of a body are its bytes."""

    def ask(self, body: bytes, form: BodyForm = BodyForm.CHAT, **fields: Any) -> RequestKey:
        return self.add([*body], body=body, body_form=form, **fields)

    def body(self, key: RequestKey) -> bytes:
        return b"".join(delta.body or b"" for delta in self.deltas[key])


@contextmanager
def running(server: TextServer | RouteServer, **settings: Any) -> Iterator[Driven]:
    engine = OpenAiEngine(config(server, **settings))
    engine.begin(lambda: None)
    yield Driven(engine)
    engine.close()


@pytest.fixture
def driven(server: TextServer) -> Iterator[Driven]:
    with running(server) as driven:
        yield driven


def test_the_card_says_which_bodies_the_server_takes(driven: Driven) -> None:
    card = driven.engine.card
    assert (card.name, card.engine, card.vocab_size) == ("wordy", "openai", 256)
    assert card.takes_bodies == (BodyForm.CHAT, BodyForm.MESSAGES)  # it answers 404 to completions
    assert not card.takes_published and card.endpoint == ""


def test_the_card_has_the_role(server: TextServer) -> None:
    with running(server, role="prefill") as driven:
        assert driven.engine.card.role == "prefill"


def test_names_that_change_at_the_server_change_on_the_card(driven: Driven, server: TextServer) -> None:
    assert driven.engine.card.aliases == ()
    server.other_names = ["gpt-4o"]
    driven.step_until(lambda: driven.engine.card.aliases == ("gpt-4o",))
    driven.finish(driven.ask(chat(model="gpt-4o")))
    assert json.loads(server.bodies[-1])["model"] == "wordy"
    server.other_names, server.adapters = [], ["tuned"]
    driven.step_until(lambda: driven.engine.card.aliases == ())
    assert [adapter.name for adapter in driven.engine.card.adapters] == ["tuned"]
    driven.finish(driven.ask(chat(model="tuned"), adapter="tuned"))
    assert json.loads(server.bodies[-1])["model"] == "tuned"


def test_an_answer_passes_as_it_is(driven: Driven, server: TextServer) -> None:
    body = chat()
    key = driven.ask(body)
    last = driven.finish(key)
    assert [json.loads(each) for each in server.bodies] == [json.loads(body)]
    answer = json.loads(driven.body(key))
    assert (answer["id"], answer["odd"]) == ("theirs", [1, 2.5])
    assert driven.num_tokens(key) == 4
    assert last.finish_reason is FinishReason.STOP and last.usage is not None
    assert (last.usage.num_prompt_tokens, last.usage.num_cached_tokens) == (len(body), 0)


def test_a_stream_comes_in_whole_events_without_the_usage_that_nobody_asked_for(driven: Driven) -> None:
    key = driven.ask(chat(stream=True, max_tokens=5))
    last = driven.finish(key)
    assert last.finish_reason is FinishReason.LENGTH
    stream = driven.body(key)
    assert b'"usage"' not in stream and stream.endswith(b"data: [DONE]\n\n")
    assert all((delta.body or b"\n\n").endswith(b"\n\n") for delta in driven.deltas[key])
    assert driven.num_tokens(key) == 5, "roles, ends and usage are no tokens"

    asked = driven.ask(chat(stream=True, stream_options={"include_usage": True}))
    driven.finish(asked)
    assert b'"usage"' in driven.body(asked)


def test_what_was_sent_is_believed_and_what_the_server_says_corrects_it(
    driven: Driven, server: TextServer
) -> None:
    body = chat()
    size = driven.engine.card.block_size
    driven.finish(driven.ask(body))
    driven.step_until(lambda: not driven.engine.has_work())
    hashes = hash_blocks(ROOT, list(body), size)
    assert set(driven.balance.held) == set(hashes)
    again = driven.finish(driven.ask(body))
    assert again.usage is not None
    assert 0.9 * len(body) < (again.usage.num_cached_tokens or 0) < len(body)

    server.forget()
    gone = driven.finish(driven.ask(chat(WORDS + " and more")))
    assert gone.usage is not None and gone.usage.num_cached_tokens == 0


def test_two_replicas_at_one_server_believe_each_what_they_have_sent(server: TextServer) -> None:
    engines = [OpenAiEngine(config(server)) for _ in range(2)]
    first, second = map(Driven, engines)
    body = chat()
    first.finish(first.ask(body))
    assert (engines[0].step().load.num_cached_blocks, engines[1].step().load.num_cached_blocks) == (
        len(body) // engines[0].card.block_size,
        0,
    )
    told = second.finish(second.ask(body)).usage
    assert told is not None and (told.num_cached_tokens or 0) > 0.9 * len(body)  # of what the first has sent
    assert first.balance.held == second.balance.held
    for engine in engines:
        engine.close()


def test_unknown_is_not_nothing(driven: Driven, server: TextServer) -> None:
    server.tells_cached = False
    last = driven.finish(driven.ask(chat()))
    assert last.usage is not None and last.usage.num_cached_tokens is None


def test_anthropics_bodies(driven: Driven) -> None:
    key = driven.ask(chat(), BodyForm.MESSAGES)
    last = driven.finish(key)
    assert json.loads(driven.body(key))["content"] == [{"type": "text", "text": "hello"}]
    assert last.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("answers HTML", RefusalCode.INTERNAL, "answers 200"),
        ("redirects", RefusalCode.INTERNAL, "answers 307"),
        ("is full", RefusalCode.OVERLOADED, "no slot is free"),
        ("refuses", RefusalCode.INVALID_REQUEST, "audio is not understood"),
        ("breaks off", RefusalCode.INTERNAL, "has no end"),
        ("is compressed", RefusalCode.INTERNAL, "it is compressed: gzip"),
        ("sends an endless line", RefusalCode.INTERNAL, "an event of more than 8388608 bytes"),
        ("sends endless events", RefusalCode.INTERNAL, "more than 1048576 bytes"),
        ("sends endless comments", RefusalCode.INTERNAL, "more than 1048576 bytes"),
    ],
)
def test_a_fault_ends_its_request_alone(
    driven: Driven,
    server: TextServer,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    code: RefusalCode,
    words: str,
) -> None:
    monkeypatch.setattr(upstream, "MOST_STREAM_BYTES", 2**20)
    if fault == "sends an endless line":
        monkeypatch.setattr(upstream, "MOST_STREAM_BYTES", 2**24)
    server.fault = fault
    last = driven.finish(driven.ask(chat(stream=True)))
    assert last.finish_reason is FinishReason.ERROR and last.refusal is not None
    assert last.refusal.code is code
    assert words in last.refusal.message
    server.fault = ""
    assert driven.finish(driven.ask(chat())).finish_reason is FinishReason.STOP


def test_an_aborted_request_is_ended_at_the_server(driven: Driven, server: TextServer) -> None:
    server.fault = "stalls"
    key = driven.ask(chat(stream=True))
    driven.step_until(lambda: bool(driven.deltas[key]))
    assert server.num_open == 1
    driven.engine.abort(key)
    driven.step_until(lambda: server.num_open == 0)
    assert driven.engine.step().load.num_running == 0


@pytest.mark.parametrize(
    "usage",
    [
        {"completion_tokens": -7, "prompt_tokens": -1, "prompt_tokens_details": {"cached_tokens": 3}},
        {"completion_tokens": 10**12, "prompt_tokens_details": {"cached_tokens": 10**30}},
        {"completion_tokens": 4 * 10**9, "prompt_tokens_details": {"cached_tokens": -1}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_usage_that_no_server_can_mean_is_not_believed(
    driven: Driven, server: TextServer, usage: dict[str, Any], stream: bool
) -> None:
    server.usage = usage
    key = driven.ask(chat(stream=stream))
    last = driven.finish(key)
    assert last.usage is not None and last.usage.num_cached_tokens is None
    assert 0 <= driven.num_tokens(key) <= 4


@pytest.mark.parametrize(("told", "known"), [(None, 0), (2, 2), (-1, 0), (2**40, 0)])
def test_the_load_tells_the_servers_slots(server: TextServer, told: int | None, known: int) -> None:
    server.num_slots = told
    with running(server) as driven:
        assert driven.engine.step().load.num_places == known


def test_an_answer_that_waited_for_a_slot_measures_nothing(server: TextServer) -> None:
    server.num_slots = 1
    engine = OpenAiEngine(config(server))
    engine.begin(lambda: None)
    driven = Driven(engine)
    server.fault = "stalls"
    first = driven.ask(chat(stream=True))
    driven.step_until(lambda: bool(driven.deltas[first]))
    server.fault = ""
    driven.finish(driven.ask(chat(stream=True)))
    load = engine.step().load
    assert load.prefill_seconds_per_token == 0.0 and load.place_seconds > 0.0  # by the age of the first
    engine.abort(first)
    driven.finish(driven.ask(chat(stream=True)))
    assert engine.step().load.prefill_seconds_per_token > 0.0
    engine.close()


def test_what_the_server_says_of_its_speed_is_believed(driven: Driven, server: TextServer) -> None:
    server.timings = {"cache_n": 0, "prompt_n": 100, "prompt_ms": 5000.0}
    body = chat()
    driven.finish(driven.ask(body))
    assert driven.engine.step().load.prefill_seconds_per_token == pytest.approx(5.0 / len(body))


def test_a_comment_is_no_beginning_of_an_answer(driven: Driven, server: TextServer) -> None:
    server.fault = "pings"
    key = driven.ask(chat(stream=True))
    ends_at = time.monotonic() + WAIT_SECONDS
    while not driven.engine.has_work():
        assert time.monotonic() < ends_at
        time.sleep(0.005)
    frame = driven.engine.step()
    assert not frame.deltas and not frame.started and frame.load.num_waiting == 1
    driven.finish(key)
    assert driven.body(key).startswith(b"data: ")


@pytest.mark.parametrize("owner", ["vllm", "sglang", "library", "openai"])
def test_namespaces_are_apart_in_the_cache_of_a_server_that_takes_a_salt(
    server: TextServer, owner: str
) -> None:
    server.owner = owner
    with running(server) as driven:
        for root in (ROOT, BlockHash(b"another tenant's")):
            driven.finish(driven.ask(chat(), root=root))
    salts = [json.loads(body).get("cache_salt") for body in server.bodies]
    is_salted = owner in ("vllm", "sglang")
    assert salts == ([ROOT.hex(), b"another tenant's".hex()] if is_salted else [None, None])


@pytest.mark.parametrize("fault", ["lingers", "breaks off after its end", "forgets its end"])
def test_an_answer_ends_with_its_last_event(driven: Driven, server: TextServer, fault: str) -> None:
    server.fault = fault
    assert driven.finish(driven.ask(chat(stream=True))).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("fault", ["hangs", "is loading", "drips"])
def test_a_server_that_hangs_ends_its_replica(
    driven: Driven, server: TextServer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(upstream, "CONNECT_SECONDS", 0.5)
    server.fault = fault
    with pytest.raises(EngineDied, match="has not answered"):
        driven.step_until(lambda: False)


def test_a_server_that_writes_does_not_hang(
    driven: Driven, server: TextServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with a thread for each connection may have none to spare for a look."""
    monkeypatch.setattr(upstream, "CONNECT_SECONDS", 0.2)
    server.fault = "is busy"
    last = driven.finish(driven.ask(chat(stream=True, max_tokens=30)))
    assert last.finish_reason is FinishReason.LENGTH


def test_a_server_that_loses_the_model_is_gone(driven: Driven, server: TextServer) -> None:
    server.served_name = "another"
    with pytest.raises(EngineDied, match="has no model wordy; it has another"):
        driven.step_until(lambda: False)


def test_tokens_without_a_body_are_refused(driven: Driven) -> None:
    with pytest.raises(RequestRefused, match="a client's body"):
        driven.engine.add(engine_request([1, 2, 3]))
    with pytest.raises(RequestRefused, match="a client's body"):
        driven.ask(chat(), BodyForm.COMPLETION)


def test_a_models_name_that_the_server_lacks(server: TextServer) -> None:
    with pytest.raises(StartupError, match="no model other; it has wordy"):
        OpenAiEngine(config(server, engine_model="other"))


def test_settings_that_are_not_its(server: TextServer) -> None:
    for name, value in (("engine_rank", 0), ("engine_events_elsewhere", True)):
        with pytest.raises(SettingsError, match=f"setting {name} is for the engine remote, not for openai"):
            config(server, **{name: value})
    with pytest.raises(SettingsError, match="setting engine_endpoint is for the engine openai only with"):
        config(server, engine_endpoint="10.0.0.7:8000")
    with pytest.raises(SettingsError, match="setting routes has /v1/load_lora_adapter; it takes /v1/embedd"):
        config(server, routes=("/v1/load_lora_adapter",))
    with pytest.raises(SettingsError, match="setting routes is for the engine openai, not for torch"):
        ReplicaConfig(routes=("/v1/embeddings",))
    with pytest.raises(SettingsError, match="engine_url"):
        ReplicaConfig(engine="openai")


@pytest.fixture
def passing() -> Iterator[tuple[Driven, RouteServer]]:
    """An engine in front of a server that generates nothing."""
    server = RouteServer()
    with running(server, routes=("/v1/embeddings",), engine_endpoint="10.0.0.7:8000") as driven:
        yield driven, server
    server.close()


def pass_on(driven: Driven, route: str = "/v1/embeddings") -> RequestKey:
    body, kind = b'{"model": "ours", "input": "a"}', "application/json"
    return driven.ask(body, BodyForm.PASSED, route=route, content_type=kind)


def test_a_body_is_passed_on_to_a_route_that_was_set(passing: tuple[Driven, RouteServer]) -> None:
    driven, server = passing
    card = driven.engine.card
    assert (card.takes_bodies, card.routes) == (("passed",), ("/v1/embeddings",))
    assert card.endpoint == "10.0.0.7:8000"
    key = pass_on(driven)
    last = driven.finish(key)
    assert driven.deltas[key][0].body == b"application/json"
    assert json.loads(driven.body(key).removeprefix(b"application/json"))["usage"]["prompt_tokens"] == 7
    assert last.usage is not None and last.usage.num_prompt_tokens == 7
    with pytest.raises(RequestRefused, match="is not passed on here"):
        pass_on(driven, "/v1/models")
    assert len(server.came) == 1


@pytest.mark.parametrize("bound", ["MOST_ANSWER_BYTES", "PASSED_SECONDS"])
def test_an_answer_that_is_passed_on_has_bounds(
    passing: tuple[Driven, RouteServer], bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven, server = passing
    monkeypatch.setattr(upstream, bound, 0.5)
    server.fault = "hangs" if bound == "PASSED_SECONDS" else ""
    refusal = driven.finish(pass_on(driven)).refusal
    assert refusal is not None and refusal.code is RefusalCode.INVALID_REQUEST  # tried nowhere else
    assert refusal.error is not None and refusal.error.status == 502
    driven.step_until(lambda: not server.num_open)


def test_what_was_not_sent_may_be_tried_elsewhere(passing: tuple[Driven, RouteServer]) -> None:
    driven, server = passing
    server.close()
    refusal = driven.finish(pass_on(driven)).refusal
    assert refusal is not None and refusal.code is RefusalCode.INTERNAL
