"""Splits at servers with NIXL: what of a first server's answer ever reaches a second."""

import logging
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from replicas.config import ReplicaConfig
from replicas.engine import RequestRefused
from replicas.errors import StartupError
from replicas.process.settings import SettingsError
from replicas.protocol.frames import MAX_HANDOVER_BYTES, FinishReason, PromptUsage, RequestKey
from replicas.protocol.split_handover import SplitHandover, read_handover, sent_on
from replicas.protocol.status import SplitWay
from replicas.remote_engine.engine import RemoteEngine
from replicas.remote_engine.nixl import PARAMS
from tests.replicas.builders import OTHER_ROOT, engine_request
from tests.replicas.remote_engine.driven import Driven
from tests.replicas.remote_engine.sglang_stand_in import SglangStandIn
from tests.replicas.remote_engine.stand_in import BLOCK_SIZE, StandIn, token_of

PROMPT = list(range(100, 100 + 3 * BLOCK_SIZE + 1))
OFFERED: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[4, 5, 6, 7]],
    "remote_engine_id": "engine",
    "remote_request_id": "cmpl-1-0",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 16,
}
GRAMMAR = '{"grammars": [{"name": "answer", "lark_grammar": "start: \\"x\\""}]}'


@contextmanager
def running(server: StandIn, **settings: Any) -> Iterator[Driven]:
    own = {"engine_url": server.url, "kv_connector": "nixl", "build_seconds": 20.0, **settings}
    engine = RemoteEngine(ReplicaConfig(engine="remote", **own))
    engine.begin(lambda: None)
    yield Driven(engine)
    engine.close()


@pytest.fixture
def driven(server: StandIn) -> Iterator[Driven]:
    server.offered = OFFERED
    with running(server) as driven:
        yield driven


def usage_of(driven: Driven, key: RequestKey) -> PromptUsage:
    last = driven.finish(key)
    assert last.refusal is None and last.usage is not None
    return last.usage


def computed(driven: Driven, **fields: Any) -> bytes:
    """Compute a prompt for another server; returns what the replica says to that one's."""
    key = driven.add(PROMPT, max_tokens=1, split_id=7, **fields)
    return usage_of(driven, key).handover


def handed_over(driven: Driven, handover: bytes, prompt: list[int] = PROMPT, **fields: Any) -> PromptUsage:
    """Answer a prompt with what was said, which makes no difference to the answer."""
    key = driven.add(prompt, handover=handover, **fields)
    usage = usage_of(driven, key)
    assert driven.tokens(key) == [token_of(prompt, number) for number in range(4)]
    return usage


def aged(handover: bytes, **changed: Any) -> bytes:
    found = read_handover(handover)
    assert found is not None
    return msgspec.structs.replace(found, **changed).packed()


def params_sent(server: StandIn) -> list[Any]:
    """The params of each request, less what first parts ask."""
    said = [body.get(PARAMS) for body in server.bodies]
    return [each for each in said if each is not None and not each["do_remote_decode"]]


def test_a_first_part_is_asked_for_one_token_and_what_comes_with_it(driven: Driven, server: StandIn) -> None:
    assert driven.engine.card.splits_by is SplitWay.NIXL
    driven.finish(driven.add(PROMPT[: BLOCK_SIZE + 1]))
    before = time.time()
    key = driven.add(PROMPT, max_tokens=9, min_tokens=3, split_id=7, num_logprobs=2, grammar=GRAMMAR)
    usage = usage_of(driven, key)
    body = server.bodies[-1]
    asked = body[PARAMS]
    assert (asked.pop("do_remote_decode"), asked.pop("do_remote_prefill")) == (True, False)
    assert set(asked.values()) == {None}
    assert (body["stream"], body["max_tokens"], body["min_tokens"]) == (False, 1, 0)
    assert not {"logprobs", "structured_outputs", "stream_options"} & body.keys()
    assert (usage.num_prompt_tokens, usage.num_cached_tokens) == (len(PROMPT), BLOCK_SIZE)
    handover = read_handover(usage.handover)
    assert handover is not None and msgspec.json.decode(handover.params) == OFFERED
    assert handover.lease_seconds == 30 and before <= handover.came_at <= time.time()
    with pytest.raises(RequestRefused, match="for others once"):
        driven.add(PROMPT, split_id=8, num_choices=2)


@pytest.mark.parametrize(
    "fault",
    ["full", "refuses", "fails", "html", "redirects", "nonsense", "no end", "endless line", "error inside"],
)
def test_a_first_part_that_fails_hands_nothing_over(driven: Driven, server: StandIn, fault: str) -> None:
    server.fault = fault
    last = driven.finish(driven.add(PROMPT, max_tokens=1, split_id=7))
    assert last.refusal is not None and last.usage is None
    server.fault = ""
    assert computed(driven) and len(driven.engine._live) == 0


def test_a_first_part_that_is_aborted_is_ended_at_the_server(driven: Driven, server: StandIn) -> None:
    server.fault = "never answers"
    key = driven.add(PROMPT, max_tokens=1, split_id=7)
    driven.step_until(lambda: server.num_open == 1)
    driven.engine.abort(key)
    driven.step_until(lambda: server.num_open == 0)
    assert driven.deltas[key] == []


def test_a_second_part_takes_what_came_unchanged_and_once(driven: Driven, server: StandIn) -> None:
    handover = computed(driven)
    usage = handed_over(driven, handover)
    assert params_sent(server) == [OFFERED]
    assert usage.num_split_tokens == len(PROMPT)
    assert handed_over(driven, handover).num_split_tokens == 0  # whoever sends it again
    assert params_sent(server) == [OFFERED]


def test_what_was_handed_over_measures_no_speed_and_corrects_no_prediction(server: StandIn) -> None:
    server.offered, server.has_events = OFFERED, False
    with running(server) as driven:
        handover = computed(driven)
        driven.finish(driven.add([*PROMPT[: 2 * BLOCK_SIZE], *range(600, 640)]))
        before = driven.engine.step().load.prefill_seconds_per_token
        server.says_cached = lambda _: 0  # as the first server had it
        handed_over(driven, handover)
        load = driven.engine.step().load
        assert (load.prefill_seconds_per_token, load.is_predicted) == (before, True)
        assert driven.balance.held.total() == 5 and not driven.balance.removed


TORN: list[dict[str, Any] | None] = [
    None,
    {},
    *({key: value for key, value in OFFERED.items() if key != gone} for gone in list(OFFERED)[:7]),
    *({**OFFERED, key: None} for key in list(OFFERED)[:7]),
    {**OFFERED, "remote_block_ids": []},
    {**OFFERED, "remote_block_ids": [[]]},
    {**OFFERED, "remote_block_ids": [["4"]]},
    {**OFFERED, "remote_port": 0},
    {**OFFERED, "remote_port": "5600"},
    {**OFFERED, "remote_host": ""},
    {**OFFERED, "do_remote_prefill": False},
    {**OFFERED, "do_remote_decode": True},
    {**OFFERED, "transfer_mode": "push"},
    {**OFFERED, "remote_block_ids": [list(range(MAX_HANDOVER_BYTES // 4))]},
]


def test_what_is_not_whole_reaches_nobody(driven: Driven, server: StandIn) -> None:
    whole = computed(driven)
    for offered in TORN:
        server.offered = offered
        assert computed(driven) == b"", offered  # not from the first
        torn = aged(whole, params=msgspec.json.encode(offered))
        if torn:
            assert handed_over(driven, torn).num_split_tokens == 0, offered  # and not to the second
    assert params_sent(server) == []


def test_bytes_that_are_no_handover_reach_nobody(driven: Driven, server: StandIn) -> None:
    whole = computed(driven)
    noise, deep = random.Random(3).randbytes(500), aged(whole, params=b'{"a":' * 50_000)
    for sent in (b"", whole[: len(whole) // 2], noise, msgspec.msgpack.encode([1, 2]), deep):
        assert handed_over(driven, sent).num_split_tokens == 0
    assert params_sent(server) == []


@pytest.mark.parametrize(
    "fields", [{"root": OTHER_ROOT}, {"prompt": [*PROMPT[:-1], 99]}, {"prompt": PROMPT[1:]}]
)
def test_it_never_goes_with_another_prompt(driven: Driven, server: StandIn, fields: dict[str, Any]) -> None:
    assert handed_over(driven, computed(driven), **fields).num_split_tokens == 0
    assert params_sent(server) == []


@pytest.mark.parametrize(
    ("changed", "is_sent"),
    [
        ({"age_seconds": 14.0}, True),
        ({"age_seconds": 15.1}, False),
        ({"age_seconds": float("nan")}, False),
        ({"lease_seconds": 0.0}, False),
        ({"lease_seconds": float("nan")}, False),
        ({"came_at": 0.0}, False),
        ({"came_at": float("nan")}, False),
        ({"came_at": time.time() + 3600}, True),  # a clock that is ahead shows nothing
    ],
)
def test_it_is_not_used_after_half_of_its_lease(
    driven: Driven, server: StandIn, changed: dict[str, float], is_sent: bool
) -> None:
    handover = aged(computed(driven), **changed)
    assert bool(handed_over(driven, handover).num_split_tokens) is is_sent
    assert len(params_sent(server)) == is_sent


def test_its_age_is_looked_at_when_it_is_sent(
    driven: Driven, server: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread of HTTP is held up for longer than half of the lease."""
    handover = computed(driven)
    submit = driven.engine._server.submit

    def held_up(name: str, sent: Any) -> None:
        sent.second_part._since -= 15.1
        submit(name, sent)

    monkeypatch.setattr(driven.engine._server, "submit", held_up)
    with caplog.at_level(logging.WARNING):
        assert handed_over(driven, handover).num_split_tokens == 0
    assert params_sent(server) == [] and "it is too old" in caplog.text


def test_other_choices_wait_for_the_first_and_have_no_params(
    driven: Driven, server: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    handover = computed(driven)
    server.fault = "slow"
    keys = [RequestKey(1, choice) for choice in range(3)]
    for key in keys:
        fields: dict[str, Any] = {"num_choices": 3, "handover": handover, "ignore_eos": True}
        driven.engine.add(engine_request(PROMPT, serial=1, choice=key.choice, **fields))
        driven.deltas[key] = []
    driven.step_until(lambda: len(server.bodies) == 2)  # with the first part
    driven.step()
    assert driven.frame.load.num_waiting >= 3
    server.fault = ""
    assert [usage_of(driven, key).num_split_tokens for key in keys] == [len(PROMPT), 0, 0]
    assert params_sent(server) == [OFFERED]
    assert usage_of(driven, keys[2]).num_cached_tokens == 3 * BLOCK_SIZE
    assert "is computed though" not in caplog.text
    assert len(driven.engine._live) == 0


@pytest.mark.parametrize("how", ["aborted", "refused", "broken off"])
def test_other_choices_do_not_wait_for_a_first_that_ends(driven: Driven, server: StandIn, how: str) -> None:
    handover = computed(driven)
    server.fault = {"aborted": "slow", "refused": "refuses", "broken off": "error first"}[how]
    for choice in range(3):
        fields: dict[str, Any] = {"num_choices": 3, "handover": handover, "ignore_eos": True}
        driven.engine.add(engine_request(PROMPT, serial=1, choice=choice, **fields))
        driven.deltas[RequestKey(1, choice)] = []
    driven.step_until(lambda: len(server.bodies) == 2)
    driven.engine.abort(RequestKey(1, 2))
    server.fault = ""
    if how == "aborted":
        driven.engine.abort(RequestKey(1, 0))
    else:
        assert driven.finish(RequestKey(1, 0)).finish_reason is FinishReason.ERROR
    assert usage_of(driven, RequestKey(1, 1)).num_split_tokens == 0
    driven.step_until(lambda: server.num_open == 0)
    assert len(server.bodies) == 3 and len(driven.engine._live) == 0 and driven.deltas[RequestKey(1, 2)] == []


def test_a_router_counts_all_the_time_but_what_the_first_part_took() -> None:
    handover = SplitHandover(b"{}", bytes(16), lease_seconds=30.0, took_seconds=40.0, came_at=1000.0)
    for elapsed, age in ((39.0, 0.0), (41.0, 1.0), (55.0, 15.0)):
        again = read_handover(sent_on(handover.packed(), elapsed, 1001.0))
        assert again is not None and again.age_seconds == age
    assert sent_on(handover.packed(), 55.1, 1001.0) == b""
    assert sent_on(handover.packed(), 41.0, 1015.1) == b""  # by the clocks of the hosts
    assert sent_on(handover.packed(), float("nan"), 1001.0) == b""
    assert sent_on(b"", 41.0, 1001.0) == sent_on(b"noise", 41.0, 1001.0) == b""


def test_without_the_setting_a_server_is_asked_and_handed_nothing(driven: Driven, server: StandIn) -> None:
    handover = computed(driven)
    server.bodies.clear()
    with running(server, kv_connector=None) as plain:
        assert plain.engine.card.splits_by is SplitWay.NONE
        assert handed_over(plain, handover).num_split_tokens == 0
        assert computed(plain) == b""
    assert [PARAMS in body for body in server.bodies] == [False, False]


def test_the_setting_is_for_servers_of_vllm(sglang: SglangStandIn) -> None:
    with pytest.raises(StartupError, match="SGLang's bootstrap is not supported yet"), running(sglang):
        pass
    with pytest.raises(SettingsError, match="kv_connector is for the engine remote"):
        ReplicaConfig(kv_connector="nixl")
    with pytest.raises(SettingsError, match="kv_connector is nixl or none, not mooncake"):
        ReplicaConfig(engine="remote", engine_url="http://a:1", kv_connector="mooncake")
