"""An ordinary `vllm serve` as an engine: every hit is foretold by its events, and its death is noticed."""

import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import zmq

from replicas.config import ReplicaConfig
from replicas.engine import RequestRefused
from replicas.proof import prove_hashes
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.frames import FinishReason, UserTag
from replicas.protocol.sampling_defaults import PARAMETERS, SamplingDefaults
from replicas.remote_engine.engine import RemoteEngine
from replicas.toy_model import checkpoint_directory
from replicas.toy_model.make_hybrid_model import write_hybrid_model
from tests.replicas.builders import OTHER_ROOT, ROOT
from tests.replicas.remote_engine.driven import Driven
from tests.replicas.vllm_engine.lora import write_adapter
from tests.replicas.vllm_engine.variants import write_quantized

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(700),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed: ./kvasir test --all installs it",
    ),
]

NUM_PROMPTS = 80
GRAMMAR = json.dumps(
    {
        "grammars": [
            {"name": "answer", "lark_grammar": 'start: "x" @text\n'},
            {"name": "text", "json_schema": {"enum": ["yes", "no"]}},
        ]
    }
)


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def publishing() -> list[str]:
    """Return the options of a server that publishes its events."""
    events, replays = free_ports(2)
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replays}",
    }
    return ["--kv-events-config", json.dumps(config)]


@contextmanager
def serving(
    log: Path, *options: str, model: Path | None = None, more: Mapping[str, str] | None = None
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--model", str(checkpoint_directory(None) if model is None else model), "--port", str(port)]
    command += ["--served-model-name", "toy", "gpt-4o"]
    command += ["--enforce-eager", "--block-size", "32", "--num-gpu-blocks-override", "64"]
    command += ["--max-model-len", "1024", "--enable-prompt-tokens-details", *options]
    environment = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        **(more or {}),
    }
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    log = tmp_path_factory.mktemp("vllm") / "log"
    greedy = json.dumps({"temperature": 0.0})
    options = [*publishing(), "--override-generation-config", greedy]
    options += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
    with serving(log, *options) as served:
        yield served


@contextmanager
def _driving(url: str, model: Path | None = None) -> Iterator[Driven]:
    given = None if model is None else str(model)
    engine = RemoteEngine(ReplicaConfig(engine="remote", engine_url=url, build_seconds=500.0, model=given))
    try:
        prove_hashes(engine, random.SystemRandom())
        engine.begin(lambda: None)
        yield Driven(engine)
    finally:
        engine.close()


@pytest.fixture
def driven(server: tuple[str, "subprocess.Popen[bytes]"]) -> Iterator[Driven]:
    with _driving(server[0]) as driven:
        yield driven


def _foretold(driven: Driven, root: BlockHash, prompt: list[int]) -> int:
    """By the events alone: the leading blocks that are held, less the one token that is always computed."""
    size = driven.engine.card.block_size
    num_held = 0
    for block_hash in hash_blocks(root, prompt, size):
        if not driven.balance.held[block_hash]:
            break
        num_held += 1
    return min(num_held, (len(prompt) - 1) // size) * size


def _settle(driven: Driven) -> None:
    """Hear the events of the last answer: they may come after it."""
    feed = driven.engine._feed
    if feed is not None:
        assert feed._source.replay_endpoint is not None
        last = _last_batch(feed._source.replay_endpoint)
        driven.step_until(lambda: feed._expected > last)
    ends_at = time.monotonic() + 0.05
    while time.monotonic() < ends_at:
        driven.step()
        time.sleep(0.01)


def _last_batch(replays: str) -> int:
    """Number of the last batch of events. Two equal replays, since the server takes one batch from its queue
    between them."""
    found = [0]
    while len(found) < 3 or found[-1] != found[-2]:
        with zmq.Context.instance().socket(zmq.DEALER) as dealer:
            dealer.connect(replays)
            dealer.send_multipart([b"", found[-1].to_bytes(8)])
            while (number := int.from_bytes(dealer.recv_multipart()[-2], signed=True)) >= 0:
                last = number
        found.append(last)
    return found[-1]


def _told_and_foretold(driven: Driven) -> list[tuple[int, int]]:
    """Of prompts that share beginnings: the hit that the server told, and the one that was foretold."""
    rng = random.Random(3)
    shared = [[rng.randrange(3, 2000) for _ in range(rng.randrange(100, 400))] for _ in range(8)]
    found = []
    for number in range(NUM_PROMPTS):
        head = rng.choice(shared)
        prompt = head[: rng.randrange(40, len(head))] if rng.random() < 0.5 else [*head, number, 7]
        root = rng.choice([ROOT, ROOT, OTHER_ROOT])
        foretold = _foretold(driven, root, prompt)
        key = driven.add(prompt, root=root, max_tokens=rng.randrange(1, 40), user=UserTag(b"u"))
        usage = driven.finish(key).usage
        assert usage is not None and usage.num_cached_tokens is not None
        found.append((usage.num_cached_tokens, foretold))
        _settle(driven)
    assert driven.balance.removed.total() > 50, "nothing was evicted, so little was tried"
    return found


def test_every_hit_is_foretold(driven: Driven) -> None:
    found = _told_and_foretold(driven)
    assert [pair for pair in found if pair[0] != pair[1]] == []
    assert sum(told for told, _ in found) > 1000


def test_logprobs_grammars_and_stops_pass_through(driven: Driven) -> None:
    key = driven.add([5, 6, 7], max_tokens=12, grammar=GRAMMAR, num_logprobs=2, ignore_eos=False)
    assert driven.finish(key).finish_reason is FinishReason.STOP
    logprobs = [entry for delta in driven.deltas[key] for entry in delta.logprobs or ()]
    assert [entry.token_id for entry in logprobs] == driven.tokens(key)
    assert all(len(entry.top) == 2 for entry in logprobs)
    whole = driven.add([5, 6, 7], max_tokens=4, temperature=0.0)
    driven.finish(whole)
    first = driven.tokens(whole)
    resumed = driven.add([5, 6, 7, *first[:2]], max_tokens=4, temperature=0.0, num_output_tokens=2)
    driven.finish(resumed)
    assert driven.tokens(resumed) == first[2:]


def test_its_names_are_known_and_adapters_that_it_loads_and_unloads(
    driven: Driven, server: tuple[str, "subprocess.Popen[bytes]"], tmp_path: Path
) -> None:
    engine, url = driven.engine, server[0]
    assert (engine.card.name, engine.card.aliases, engine.card.adapters) == ("toy", ("gpt-4o",), ())
    said, fingerprints = [], set()
    for seed in (1, 2):
        lies = str(write_adapter(tmp_path / f"adapter-{seed}", seed=seed))
        loaded = {"lora_name": "tuned", "lora_path": lies}
        assert httpx.post(f"{url}/v1/load_lora_adapter", json=loaded, timeout=60).status_code == 200
        driven.step_until(lambda: bool(engine.card.adapters))
        fingerprints |= {adapter.fingerprint for adapter in engine.card.adapters}
        for adapter in ("tuned", None):
            key = driven.add([5, 6, 7], max_tokens=8, temperature=0.0, adapter=adapter)
            assert driven.finish(key).refusal is None
            said.append(driven.tokens(key))
        unloaded = httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "tuned"}, timeout=60)
        assert unloaded.status_code == 200
        driven.step_until(lambda: not engine.card.adapters)
        with pytest.raises(RequestRefused, match="no adapter 'tuned'"):
            driven.add([5, 6, 7], adapter="tuned")
    tuned, bare, tuned_otherwise, bare_again = said
    assert bare == bare_again
    assert tuned != bare != tuned_otherwise != tuned
    assert len(fingerprints) == 2  # equal names, other weights: other namespaces


def test_its_own_sampling_defaults_hold_where_nobody_says_otherwise(driven: Driven) -> None:
    def answers(unsaid: tuple[str, ...]) -> set[tuple[int, ...]]:
        keys = [driven.add([5, 6, 7], max_tokens=12, temperature=1.0, unsaid=unsaid) for _ in range(4)]
        for key in keys:
            driven.finish(key)
        return {tuple(driven.tokens(key)) for key in keys}

    assert driven.engine.card.sampling_defaults == SamplingDefaults()
    assert len(answers(PARAMETERS)) == 1
    assert len(answers(PARAMETERS[1:])) > 1


def test_its_death_is_noticed(driven: Driven, server: tuple[str, "subprocess.Popen[bytes]"]) -> None:
    os.killpg(server[1].pid, signal.SIGKILL)
    driven.dies("is gone|breaks off|not answered")


def test_without_events_hits_are_mostly_foretold_and_never_far_off(tmp_path: Path) -> None:
    with serving(tmp_path / "log") as (url, _), _driving(url) as driven:
        found = _told_and_foretold(driven)
        assert driven.frame.load.is_predicted
    told = sum(each for each, _ in found)
    assert told > 1000
    assert sum(max(0, foretold - each) for each, foretold in found) < 0.1 * told
    assert sum(max(0, each - foretold) for each, foretold in found) < 0.2 * told


def test_a_server_of_a_quantised_model_is_joined(tmp_path: Path) -> None:
    model = write_quantized(tmp_path / "model")
    with serving(tmp_path / "log", model=model) as (url, _), _driving(url, model) as driven:
        prompt = [7 + number % 900 for number in range(200)]
        usages = [driven.finish(driven.add(prompt, max_tokens=3)).usage for _ in range(2)]
        assert [usage and usage.num_cached_tokens for usage in usages] == [0, 192]


def test_a_server_of_a_model_with_windows_is_joined_and_keeps_what_it_says(tmp_path: Path) -> None:
    """The second prompt with a beginning cannot be resumed there, and the third can."""
    write_hybrid_model("gpt_oss", model := tmp_path / "model")
    options = ("--num-gpu-blocks-override", "512")
    with serving(tmp_path / "log", *options, model=model) as (url, _), _driving(url, model) as driven:
        shared = [7 + number % 900 for number in range(600)]
        found = []
        for number in range(3):
            prompt = [*shared, *[number + 3] * 100]
            usage = driven.finish(driven.add(prompt, max_tokens=3)).usage
            assert usage is not None
            found.append((usage.num_cached_tokens, usage.num_unresumable_tokens))
        assert driven.frame.load.is_predicted
    assert found == [(0, 0), (0, 576), (576, 0)]
