"""A server as an engine: what it serves, and what becomes of each of its faults."""

import json
import math
import queue
import random
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from replicas import proof, remote_engine
from replicas.config import ReplicaConfig
from replicas.engine import RequestRefused
from replicas.errors import StartupError
from replicas.process.settings import SettingsError
from replicas.proof import prove_hashes
from replicas.protocol.blocks import hash_blocks
from replicas.protocol.events import AllBlocksCleared, BlockStored
from replicas.protocol.frames import (
    FinishReason,
    PromptUsage,
    RefusalCode,
    ServerError,
    UserTag,
)
from replicas.protocol.prefix_leases import PrefixLease
from replicas.protocol.sampling_defaults import PARAMETERS, SamplingDefaults
from replicas.protocol.status import ModelCard
from replicas.remote_engine.believed import SHARE_BELIEVED
from replicas.remote_engine.dialect import Dialect
from replicas.remote_engine.engine import RemoteEngine
from replicas.remote_engine.facts import MOST_REQUESTS, EventSource, is_of_own_host
from replicas.remote_engine.probes import find_dialect
from replicas.remote_engine.server import Server, Unreachable
from replicas.toy_model import checkpoint_directory
from tests.certificates import Authority
from tests.replicas.builders import ROOT
from tests.replicas.remote_engine.driven import WAIT_SECONDS, Driven
from tests.replicas.remote_engine.stand_in import BLOCK_SIZE, NUM_BLOCKS, StandIn, token_of

PROMPT = list(range(100, 100 + 3 * BLOCK_SIZE + 1))


def config(server: StandIn, **settings: Any) -> ReplicaConfig:
    defaults = {"engine_url": server.url, "engine_hang_seconds": 1.0, "build_seconds": 20.0}
    return ReplicaConfig(engine="remote", **{**defaults, **settings})


@contextmanager
def running(server: StandIn, **settings: Any) -> Iterator[Driven]:
    engine = RemoteEngine(config(server, **settings))
    prove_hashes(engine, random.Random(1))
    engine.begin(lambda: None)
    yield Driven(engine)
    engine.close()


@pytest.fixture
def driven(server: StandIn) -> Iterator[Driven]:
    with running(server) as driven:
        yield driven


def test_the_card_is_what_the_server_says(driven: Driven) -> None:
    card = driven.engine.card
    assert (card.name, card.engine, card.block_size, card.num_blocks) == ("served", "remote", 16, NUM_BLOCKS)
    assert (card.context_length, card.takes_published, card.image_rule) == (512, False, "")
    assert [adapter.name for adapter in card.adapters] == ["tuned"]


def test_names_and_adapters_that_change_at_the_server_change_on_the_card(
    driven: Driven, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine.server, "LIST_SECONDS", 0.05)
    engine, first = driven.engine, driven.engine.card

    def changed() -> ModelCard:
        before = engine.card
        driven.step_until(lambda: engine.card is not before)
        assert replace(engine.card, aliases=(), adapters=first.adapters) == first
        return engine.card

    server.other_names, server.adapters = ["gpt-4o"], {"later": "/adapters/later"}
    card = changed()
    assert (card.aliases, [adapter.name for adapter in card.adapters]) == (("gpt-4o",), ["later"])
    assert driven.finish(driven.add(PROMPT, max_tokens=1, adapter="later")).refusal is None
    assert server.bodies[-1]["model"] == "later"
    with pytest.raises(RequestRefused, match="no adapter 'tuned'; this replica has later") as refused:
        driven.add(PROMPT, adapter="tuned")
    assert refused.value.error == ServerError(404, param="model", code="model_not_found")
    server.adapters = {"later": "/adapters/another"}
    assert changed().adapters[0].fingerprint != card.adapters[0].fingerprint
    kept = engine.card
    for fault in ("html", "is loading", "floods", "redirects"):  # what is no list changes nothing
        server.fault = fault
        num_lists = server.num_lists
        driven.step_until(lambda: server.num_lists > num_lists + 2)  # noqa: B023
        assert engine.card is kept
    server.fault = ""
    server.other_names, server.adapters = [], {}
    assert changed().adapters == ()
    server.served_name = "another"
    driven.dies("has no model served; it has another")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, SamplingDefaults(max_new_tokens=9)),
        ({"sampling_override": {"top_k": 3, "max_new_tokens": None}}, SamplingDefaults(top_k=3)),
        ({"sampling_defaults": "neutral"}, None),
    ],
)
def test_the_card_leaves_open_what_the_server_decides(
    server: StandIn, model_that_says: Path, settings: dict[str, Any], expected: SamplingDefaults | None
) -> None:
    engine = RemoteEngine(config(server, model=str(model_that_says), **settings))
    assert engine.card.sampling_defaults == expected
    engine.close()


def test_a_server_gets_no_parameter_that_nobody_said(driven: Driven, server: StandIn) -> None:
    driven.finish(driven.add(PROMPT, temperature=1.0, unsaid=PARAMETERS[1:], max_tokens=2))
    assert {*PARAMETERS} & {*server.bodies[-1]} == {"temperature"}


def test_a_prompt_is_served_and_found_again(driven: Driven, server: StandIn) -> None:
    key = driven.add(PROMPT, max_tokens=3, num_logprobs=1, user=UserTag(b"u"))
    last = driven.finish(key)
    assert driven.tokens(key) == [token_of(PROMPT, number) for number in range(3)]
    assert last.finish_reason is FinishReason.LENGTH and last.usage is not None
    assert (last.usage.num_cached_tokens, last.usage.num_written_tokens) == (0, 48)
    logprobs = [entry for delta in driven.deltas[key] for entry in delta.logprobs or ()]
    assert [entry.token_id for entry in logprobs] == driven.tokens(key)

    again = driven.finish(driven.add(PROMPT, max_tokens=1, user=UserTag(b"v")))
    assert again.usage is not None
    assert (again.usage.num_cached_tokens, again.usage.num_cross_user_tokens) == (48, 48)
    driven.step_until(lambda: bool(driven.events))
    stored = [event for event in driven.events if isinstance(event, BlockStored)]
    assert [each for event in stored for each in event.block_hashes] == hash_blocks(ROOT, PROMPT, BLOCK_SIZE)
    assert server.bodies[-1]["cache_salt"] == ROOT.hex()


def test_short_prompts_do_not_make_a_server_look_slow(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []
    monkeypatch.setattr(driven.engine._live, "computed", lambda tokens, _seconds: measured.append(tokens))
    for num_tokens in (20, 20, 300):
        driven.finish(driven.add([*range(num_tokens)]))
    assert measured == [256, 256, 300 - 16]  # less the block that it had


def test_an_engine_that_only_steps_when_woken_misses_nothing(server: StandIn) -> None:
    engine, woken = RemoteEngine(config(server)), threading.Event()
    engine.begin(woken.set)
    driven = Driven(engine)
    for number in range(60):
        key = driven.add([number + 3] * 20, max_tokens=8)
        while not (driven.deltas[key] and driven.deltas[key][-1].finish_reason):
            assert woken.wait(10), "something has come, and nobody was woken"
            woken.clear()
            driven.step()
    engine.close()


def test_evictions_balance(driven: Driven) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 900) for _ in range(rng.randrange(20, 150))] for _ in range(12)]
    for _ in range(40):
        assert driven.finish(driven.add(rng.choice(prompts), max_tokens=1)).refusal is None
    driven.step_until(lambda: not driven.engine.has_work())
    assert 0 < driven.balance.held.total() <= NUM_BLOCKS


def test_a_warm_server_is_known_from_its_replay(server: StandIn) -> None:
    first = Driven(RemoteEngine(config(server)))
    first.engine.begin(lambda: None)
    first.finish(first.add(PROMPT, max_tokens=1))
    first.engine.close()
    with running(server) as driven:
        driven.step_until(lambda: bool(driven.events))
        stored = [event for event in driven.events if isinstance(event, BlockStored)]
        named = [each for event in stored for each in event.block_hashes]
        assert named == hash_blocks(ROOT, PROMPT, BLOCK_SIZE)


def test_others_at_the_server_count_as_load(driven: Driven) -> None:
    driven.step_until(lambda: driven.frame.load.num_running == 2)
    assert driven.frame.load.num_waiting == 1
    assert driven.frame.load.num_used_blocks == round(0.25 * NUM_BLOCKS)
    assert driven.frame.load.num_room_tokens == 0.75 * NUM_BLOCKS * BLOCK_SIZE
    assert driven.frame.load.room_seconds_per_token > 0.0, "requests of the proof have ended"


def test_an_abort_closes_the_connection(driven: Driven, server: StandIn) -> None:
    server.fault = "never ends"
    key = driven.add(PROMPT, max_tokens=5)
    driven.step_until(lambda: bool(driven.deltas[key]))
    assert server.num_open == 1
    driven.engine.abort(key)
    driven.step_until(lambda: server.num_open == 0)
    driven.step()
    assert len(driven.deltas[key]) == 1


def test_leases_are_refused_in_the_answer(driven: Driven) -> None:
    last = driven.finish(driven.add(PROMPT, max_tokens=1, leases=(PrefixLease(3, 60.0),)))
    assert last.usage is not None and last.usage.leases[0].refusal is not None


@pytest.mark.parametrize(
    ("fault", "code", "sentence"),
    [
        ("full", RefusalCode.OVERLOADED, "too many requests"),
        ("refuses", RefusalCode.INVALID_REQUEST, "temperature is too high"),
        ("fails", RefusalCode.INTERNAL, "answers 500"),
        ("redirects", RefusalCode.INTERNAL, "answers 307"),
        ("html", RefusalCode.INTERNAL, "no answer"),
        ("breaks off", RefusalCode.INTERNAL, "breaks off"),
        ("fails and drips", RefusalCode.INTERNAL, "answers 500"),
        ("nonsense", RefusalCode.INTERNAL, "breaks off"),
        ("negative", RefusalCode.INTERNAL, "breaks off"),
        ("deep", RefusalCode.INTERNAL, "breaks off"),
        ("endless line", RefusalCode.INTERNAL, "an event of more than"),
        ("endless empties", RefusalCode.INTERNAL, "more than 1027 events"),
        ("endless comments", RefusalCode.INTERNAL, "bytes that are no events"),
        ("escapes", RefusalCode.INVALID_REQUEST, "no  2026 INFO forged  [31m "),
        ("error inside", RefusalCode.INTERNAL, "out of memory"),
        ("error first", RefusalCode.INVALID_REQUEST, "boom"),
    ],
)
def test_a_fault_ends_one_request_and_no_other(
    driven: Driven,
    server: StandIn,
    fault: str,
    code: RefusalCode,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_engine.server, "ERROR_SECONDS", 0.2)
    server.fault = fault
    key = driven.add(PROMPT, max_tokens=3)
    last = driven.finish(key)
    assert last.finish_reason is FinishReason.ERROR and last.refusal is not None
    assert last.refusal.code is code
    assert sentence in last.refusal.message
    server.fault = ""
    assert driven.finish(driven.add(PROMPT, max_tokens=3)).finish_reason is FinishReason.LENGTH
    assert len([delta for delta in driven.deltas[key] if delta.finish_reason]) == 1


@pytest.mark.parametrize("fault", ["too many", "no end", "three choices", "breaks off"])
def test_an_answer_with_all_its_tokens_ends_though_its_last_event_is_missing(
    driven: Driven, server: StandIn, fault: str
) -> None:
    server.fault = fault
    key = driven.add(PROMPT, max_tokens=2)
    last = driven.finish(key)
    assert (last.finish_reason, last.refusal) == (FinishReason.LENGTH, None)
    assert last.usage is not None
    assert sum(delta.num_tokens for delta in driven.deltas[key]) == 2


@pytest.mark.parametrize("says", [None, -1, len(PROMPT) + 1, 10**30, 1.5, "48", [48]])
def test_a_server_that_does_not_tell_what_was_cached_is_not_guessed_at(
    driven: Driven, server: StandIn, says: object, caplog: pytest.LogCaptureFixture
) -> None:
    server.says_cached = lambda _: says
    for _ in range(2):
        last = driven.finish(driven.add(PROMPT, max_tokens=1))
        assert last.usage == PromptUsage(len(PROMPT), None, 0)
    assert caplog.text.count("--enable-prompt-tokens-details") == 1


def test_what_cannot_be_sent_is_refused_at_once(driven: Driven) -> None:
    for fields, word in (({"adapter": "untuned"}, "no adapter"), ({"temperature": -1.0}, "temperature")):
        with pytest.raises(RequestRefused, match=word):
            driven.add(PROMPT, **fields)
    with pytest.raises(RequestRefused, match="context length"):
        driven.add([5] * 600)


def test_a_server_that_was_started_anew_is_another_epoch(driven: Driven, server: StandIn) -> None:
    server.started_at += 1
    driven.dies("started anew")


def test_events_that_begin_anew_are_another_epoch(driven: Driven, server: StandIn) -> None:
    driven.finish(driven.add(PROMPT, max_tokens=1))
    server.restart_events()
    server.publish({"type": "AllBlocksCleared"})
    driven.dies("started anew")


@pytest.mark.parametrize("fault", ["hangs", "drips"])
def test_a_server_that_hangs_is_given_up(
    driven: Driven, server: StandIn, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine.server, "CONNECT_SECONDS", 0.2)
    server.fault = fault
    driven.dies("has not answered for 1 s")


@pytest.mark.parametrize(("says", "num_running"), [(math.inf, MOST_REQUESTS), (-5, 0), (math.nan, 0)])
def test_a_load_that_cannot_be_is_bounded(
    driven: Driven, server: StandIn, says: float, num_running: int
) -> None:
    server.num_others = says
    driven.step_until(lambda: driven.frame.load.num_running == num_running)


def test_a_name_without_an_address_says_nothing_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    news: queue.SimpleQueue[object] = queue.SimpleQueue()
    server = Server("http://server.invalid:1", key=None, rank=None, tell=news.put)

    async def fail(*_: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "later")

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", fail)
    server.speak(SimpleNamespace(look_paths=("/metrics",)))  # type: ignore[arg-type]
    server.start()
    found = news.get(timeout=WAIT_SECONDS)
    assert isinstance(found, Unreachable) and not found.is_refused
    server.close()


def test_a_server_that_is_gone_is_given_up(driven: Driven, server: StandIn) -> None:
    server._http.should_exit = server._http.force_exit = True
    driven.dies("is gone")


GROUP = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1] * 16, "block_size": 16, "group_idx": 1}


def test_events_of_groups_of_layers_are_not_followed_and_what_is_held_is_predicted_from_then_on(
    driven: Driven, server: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    driven.finish(driven.add(PROMPT, max_tokens=1))
    driven.step_until(lambda: driven.balance.held.total() == 3)
    assert not driven.frame.load.is_predicted
    server.publish(GROUP)
    driven.step_until(lambda: driven.frame.load.is_predicted)
    assert driven.events[-1] == AllBlocksCleared() and "different caches" in caplog.text
    driven.finish(driven.add(PROMPT, max_tokens=1))
    assert driven.balance.held.total() == 3


def test_tokens_behind_a_block_in_its_hash_are_not_followed_either(
    driven: Driven, server: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    server.publish({**GROUP, "group_idx": 0, "lookahead_token_ids": [[4, 5]]})
    driven.step_until(lambda: driven.frame.load.is_predicted)
    assert "disable_lookahead_block_hashes" in caplog.text


def test_a_server_of_groups_passes_the_proof(server: StandIn) -> None:
    server.publish(GROUP)
    with running(server) as driven:
        driven.step()
        assert driven.frame.load.is_predicted and driven.events == []


def test_a_server_that_is_busy_with_others_passes_the_proof(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine.server, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(proof, "MAX_PROBE_STEPS", 100)
    server.fault = "slow"
    with running(server):
        pass


@pytest.mark.parametrize(
    ("named", "url", "are_followed", "are_replayed"),
    [
        ({}, "http://127.0.0.1:1", True, True),
        ({"replay_endpoint": "tcp://localhost:5"}, "http://127.0.0.1:1", True, True),
        ({"replay_endpoint": "tcp://10.0.0.9:5"}, "http://127.0.0.1:1", True, False),
        ({"replay_endpoint": "tcp://127.0.0.1:5"}, "http://10.0.0.7:1", True, False),
        ({"replay_endpoint": "ipc:///run/any.sock"}, "http://10.0.0.7:1", True, False),
        ({"endpoint": "tcp://127.0.0.1:{free}"}, "http://127.0.0.1:1", False, False),
        ({"endpoint": "ipc://{folder}/kv.sock"}, "http://127.0.0.1:1", True, True),
        ({"endpoint": "ipc://{folder}/kv.sock"}, "http://10.0.0.7:1", False, False),
        ({"endpoint": "pgm://127.0.0.1:5"}, "http://127.0.0.1:1", False, False),
    ],
)
def test_events_are_taken_from_the_servers_own_host_unless_a_setting_says_more(
    server: StandIn,
    named: dict[str, str],
    url: str,
    are_followed: bool,
    are_replayed: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    heard: list[EventSource] = []

    class Feed:
        def __init__(self, source: EventSource, *_: object) -> None:
            heard.append(source)

        def close(self) -> None:
            pass

    def dialect_of(ask: Any, _: str, **more: Any) -> Dialect:
        return find_dialect(ask, url, **more)

    monkeypatch.setattr(remote_engine.engine, "EventFeed", Feed)
    monkeypatch.setattr(remote_engine.engine, "find_dialect", dialect_of)
    monkeypatch.setattr(remote_engine.engine, "is_of_own_host", lambda at, _: is_of_own_host(at, url))
    server.event_addresses = {
        name: each.format(folder=tmp_path, free=server.port) for name, each in named.items()
    }
    RemoteEngine(config(server)).close()
    assert [bool(source.replay_endpoint) for source in heard] == ([are_replayed] if are_followed else [])
    assert ("engine_events_elsewhere" in caplog.text) != (are_followed and are_replayed)
    heard.clear()
    RemoteEngine(config(server, engine_events_elsewhere=True)).close()
    assert [bool(source.replay_endpoint) for source in heard] == [True]


def test_events_that_never_come_are_predicted(
    server: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_engine.engine, "EVENT_SECONDS", 0.5)
    server.store(PROMPT[::-1], ROOT.hex(), None)
    server.is_mute = True
    with running(server) as driven:
        driven.finish(driven.add(PROMPT, max_tokens=1))
        assert driven.balance.held.total() == 3 and driven.frame.load.is_predicted
        assert f"none came of the probe prompt from tcp://127.0.0.1:{server.event_port}" in caplog.text


def test_the_key_goes_with_every_request(server: StandIn, tmp_path: Path) -> None:
    server.key = "sesame"
    with pytest.raises(StartupError, match=r"answers 401: Unauthorized: .* give --join-key-file FILE"):
        RemoteEngine(config(server))
    file = tmp_path / "key"
    file.write_text("sesame\n")
    RemoteEngine(config(server, engine_key_file=str(file), engine_rank=0)).close()
    assert server.headers[-1]["x-data-parallel-rank"] == "0"
    with pytest.raises(SettingsError, match="cannot be read"):
        RemoteEngine(config(server, engine_key_file=str(tmp_path / "none")))


def test_another_tokenizer_is_refused_with_the_first_difference(server: StandIn) -> None:
    server.shift_tokens = 1
    with pytest.raises(
        StartupError, match=r"token \d+ of 'The quick brown fox .*' is \d+ there and \d+ here"
    ):
        RemoteEngine(config(server))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"engine_model": "another"}, "no model another; it has served"),
        ({"block_size": 32}, "blocks have 16 tokens, and setting block_size is 32"),
        ({"engine_rank": 3}, "no vllm:cache_config_info for rank 3: is it vLLM.* --engine openai"),
    ],
)
def test_settings_that_the_server_contradicts(server: StandIn, settings: Any, sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        RemoteEngine(config(server, **settings))


def test_a_server_too_old_to_name_its_event_sources_is_said_to_be(
    server: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    server.is_old = True
    RemoteEngine(config(server)).close()
    assert "from 0.31 on" in caplog.text and "0.30.0" in caplog.text and "predicted" in caplog.text


@pytest.fixture
def silent(server: StandIn, caplog: pytest.LogCaptureFixture) -> Iterator[Driven]:
    """An engine of a server without cache events."""
    server.has_events = False
    with running(server) as driven:
        assert "predicted" in caplog.text and "--kv-events-config" in caplog.text
        yield driven


def test_without_events_what_was_sent_and_came_back_is_believed_to_be_held(silent: Driven) -> None:
    key = silent.add(PROMPT, max_tokens=BLOCK_SIZE + 1, user=UserTag(b"u"))
    silent.finish(key)
    whole = hash_blocks(ROOT, PROMPT + silent.tokens(key)[:-1], BLOCK_SIZE)
    assert silent.events == [
        BlockStored(tuple(whole[:3]), 0, ends_prompt=True),
        BlockStored(tuple(whole[3:]), 3),
    ]
    assert silent.frame.load.is_predicted and silent.frame.load.num_cached_blocks == 4
    again = silent.finish(silent.add(PROMPT, max_tokens=1, user=UserTag(b"v")))
    assert again.usage is not None
    assert (again.usage.num_cached_tokens, again.usage.num_cross_user_tokens) == (48, 48)


def test_a_shorter_hit_than_believed_corrects_it(silent: Driven, server: StandIn) -> None:
    longer = [*PROMPT[:-1], *range(300, 300 + 2 * BLOCK_SIZE)]
    for prompt in (longer, PROMPT):
        silent.finish(silent.add(prompt, max_tokens=1))
    assert silent.balance.held.total() == 5
    server.forget()
    silent.finish(silent.add(PROMPT, max_tokens=1))
    assert +silent.balance.held == Counter(hash_blocks(ROOT, PROMPT, BLOCK_SIZE))


@pytest.mark.parametrize("told_by", ["config.json", "events"])
def test_what_a_model_with_windows_did_not_keep_is_not_taken_for_evicted(
    told_by: str, server: StandIn, tmp_path: Path
) -> None:
    """Its hit is shorter than believed, and nothing has left the cache."""
    model = checkpoint_directory(None)
    if told_by == "config.json":
        server.has_events = False
        model = Path(shutil.copytree(model, tmp_path / "model"))
        sparse = {"architectures": ["GptOssForCausalLM"], "vocab_size": 2048, "sliding_window": 16}
        (model / "config.json").write_text(json.dumps(sparse))
    else:
        server.publish(GROUP)
    usages = []
    other = [*PROMPT[: 2 * BLOCK_SIZE], *range(300, 300 + BLOCK_SIZE)]
    with running(server, model=str(model)) as driven:
        for prompt, num_cached in ((PROMPT, 0), (other, 0), (other, 2 * BLOCK_SIZE)):
            server.says_cached = lambda _, num_cached=num_cached: num_cached
            usage = driven.finish(driven.add(prompt, max_tokens=1)).usage
            assert usage is not None
            usages.append((usage.num_cached_tokens, usage.num_unresumable_tokens))
    assert usages == [(0, 0), (0, 2 * BLOCK_SIZE), (2 * BLOCK_SIZE, 0)], "a last token is always computed"
    assert driven.balance.held.total() == 4, "what other prompts hold is believed as before"


def test_a_longer_hit_than_believed_is_of_no_known_user(silent: Driven) -> None:
    silent.finish(silent.add(PROMPT, max_tokens=1, user=UserTag(b"u")))
    silent.engine.reset_prefix_cache()
    again = silent.finish(silent.add(PROMPT, max_tokens=1, user=UserTag(b"v")))
    assert again.usage is not None and again.usage.num_cached_tokens == 48
    assert (again.usage.num_own_tokens, again.usage.num_cross_user_tokens) == (0, 0)


def test_nothing_that_is_told_of_a_hit_is_no_correction(silent: Driven, server: StandIn) -> None:
    for says in (None, -1, 10_000):
        server.says_cached = lambda _, says=says: says
        silent.finish(silent.add(PROMPT, max_tokens=1))
        assert silent.balance.held.total() == 3


def test_the_belief_is_bounded_by_the_servers_cache(silent: Driven) -> None:
    for number in range(12):
        silent.finish(silent.add([number + 3] * 3 * BLOCK_SIZE, max_tokens=1))
        assert silent.balance.held.total() <= SHARE_BELIEVED * NUM_BLOCKS
    assert silent.frame.load.num_cached_blocks == silent.balance.held.total()


def test_a_request_that_fails_before_its_first_token_leaves_no_belief(
    silent: Driven, server: StandIn
) -> None:
    server.fault = "fails"
    silent.finish(silent.add(PROMPT, max_tokens=1))
    assert silent.events == []


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        *(("redirects", "307.*to http://127.0.0.1:1"), ("html", "list of models cannot be read")),
        *(("drips", "does not answer: TimeoutError"), ("floods", "more than 4000000 bytes")),
    ],
)
def test_what_is_no_server_of_models_is_refused(
    server: StandIn, fault: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine.server, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(remote_engine.server, "MOST_ANSWER_BYTES", 4_000_000)
    server.fault = fault
    with pytest.raises(StartupError, match=sentence):
        RemoteEngine(config(server))


def test_a_server_behind_tls_needs_a_certificate_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    server = StandIn(authority.replica("localhost"))
    settings = config(server, engine_url=f"https://localhost:{server.port}", build_seconds=0.1)
    with pytest.raises(StartupError, match="certificate verify failed"):
        RemoteEngine(settings)
    monkeypatch.setenv("SSL_CERT_FILE", authority.certificate)
    driven = Driven(RemoteEngine(settings))
    driven.engine.begin(lambda: None)
    assert driven.finish(driven.add(PROMPT, max_tokens=1)).finish_reason is FinishReason.LENGTH
    driven.engine.close()
    server.close()


def test_two_replicas_at_one_server_both_know_what_it_holds(server: StandIn) -> None:
    both = [Driven(RemoteEngine(config(server))) for _ in range(2)]
    ours = set(hash_blocks(ROOT, PROMPT, BLOCK_SIZE))
    for number, driven in enumerate(both):
        prove_hashes(driven.engine, random.Random(number))
        driven.engine.begin(lambda: None)
    assert both[0].finish(both[0].add(PROMPT, max_tokens=1)).usage is not None
    for driven in both:
        driven.step_until(lambda driven=driven: ours <= driven.balance.held.keys())  # type: ignore[misc]
    last = both[1].finish(both[1].add(PROMPT, max_tokens=1))
    assert last.usage is not None and last.usage.num_cached_tokens == 48
    for driven in both:
        driven.engine.close()


def test_it_is_waited_for_a_server_that_is_not_there_yet() -> None:
    with pytest.raises(StartupError, match="does not answer"):
        RemoteEngine(ReplicaConfig(engine="remote", engine_url="http://127.0.0.1:1", build_seconds=1.0))
