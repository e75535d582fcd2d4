"""Two ordinary vLLM servers with NIXL behind replicas: prompts computed at one and decoded at the other."""

import asyncio
import importlib.util
import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtests.stacks.local_stack import local_stack
from replicas.host import ReplicaHost
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.frames import Abort, FinishReason, PromptUsage, TokenDelta
from replicas.protocol.split_handover import SplitHandover, read_handover
from tests.replicas.mirror import connect, read_set
from tests.replicas.remote_engine.test_vllm_server import free_ports, publishing, serving
from tests.replicas.router_client import ROOT, RouterClient, submit
from tests.replicas.whole_replica import config, running, until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    *(
        pytest.mark.skipif(
            importlib.util.find_spec(package) is None,
            reason=f"{package} is not installed: {how}",
        )
        for package, how in (
            ("vllm", "./kvasir test --all installs it"),
            ("nixl", "pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1"),
        )
    ),
]

LEASE_SECONDS = 12
OTHER_ROOT = BlockHash(bytes(15) + b"\1")
NUM_TOKENS = 700
SEEDED = {"temperature": 0.8, "seed": 11, "is_seeded": True}


class Pair(NamedTuple):
    """URLs of the server that computes prompts and of the one that decodes, and the first's process."""

    first: str
    second: str
    process: "subprocess.Popen[bytes]"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """In bfloat16 vLLM's server ends with SIGILL on some CPUs."""
    connector = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
    }
    folder = tmp_path_factory.mktemp("nixl")

    def server(name: str, port: int) -> Any:
        options = ["--dtype", "float32", "--kv-transfer-config", json.dumps(connector), *publishing()]
        own = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        ucx = {"UCX_TLS": "tcp,self,sm", "UCX_NET_DEVICES": "lo", "UCX_MEM_MMAP_HOOK_MODE": "none"}
        return serving(folder / name, *options, more={**own, **ucx, "PYTHONHASHSEED": "0"})

    ports = free_ports(2)
    with server("first", ports[0]) as (first, process), server("second", ports[1]) as (second, _):
        yield Pair(first, second, process)


class Peer:
    """A replica, its server, and a router that talks to it."""

    def __init__(self, host: ReplicaHost, client: RouterClient, url: str) -> None:
        self.host = host
        self._client = client
        self._url = url
        self._num_asked = 0

    async def begin(self, prompt: list[int], num_choices: int = 1, **fields: Any) -> int:
        """`fields` are those of the submit and of its sampling."""
        self._num_asked += 1
        own = {name: fields.pop(name) for name in ("root", "split_id", "handover") if name in fields}
        asked = submit(self._num_asked, prompt, num_choices=num_choices)
        greedy = {"max_tokens": 16, "temperature": 0.0}
        sampling = msgspec.structs.replace(asked.sampling, **{**greedy, **fields})
        await self._client.send(msgspec.structs.replace(asked, sampling=sampling, **own))
        return self._num_asked

    async def ask(self, prompt: list[int], num_choices: int = 1, **fields: Any) -> "list[Said]":
        number = await self.begin(prompt, num_choices, **fields)
        found = await self._client.finish(*((number, choice) for choice in range(num_choices)))
        return [Said.of(deltas) for deltas in found.values()]

    async def leave(self, number: int) -> None:
        await self._client.send(Abort(number))

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self._url}/metrics", timeout=60).text
        families = text_string_to_metric_families(text)
        return sum(each.value for family in families for each in family.samples if each.name == name)

    def num_taken(self) -> int:
        """How many tokens of prompts its server has taken from others."""
        return int(self.metric("vllm:external_prefix_cache_hits_total"))

    async def holds(self, redis: Any, prompt: list[int]) -> bool:
        record = self.host.record()
        held = await read_set(redis, "toy", record.replica_id, record.epoch)
        return held is not None and held.issuperset(hash_blocks(ROOT, prompt, 32))


class Said(NamedTuple):
    token_ids: list[int]
    logprobs: list[float]
    finish: FinishReason | None
    usage: PromptUsage

    @classmethod
    def of(cls, deltas: list[TokenDelta]) -> "Said":
        assert deltas[-1].refusal is None
        (usage,) = [delta.usage for delta in deltas if delta.usage is not None]
        logprobs = [entry.logprob for delta in deltas for entry in delta.logprobs or ()]
        token_ids = [token for delta in deltas for token in delta.token_ids]
        return cls(token_ids, logprobs, deltas[-1].finish_reason, usage)

    @property
    def answer(self) -> Any:
        return self.token_ids, self.logprobs, self.finish


@pytest.fixture
async def peers(servers: Pair, redis_url: str) -> AsyncIterator[tuple[Peer, Peer]]:
    async with AsyncExitStack() as stack:
        found = await asyncio.gather(
            *(
                stack.enter_async_context(_peer(redis_url, name, url))
                for name, url in (("first", servers.first), ("second", servers.second))
            )
        )
        yield found[0], found[1]


@asynccontextmanager
async def _peer(redis_url: str, name: str, url: str) -> AsyncIterator[Peer]:
    own = {"kv_connector": "nixl", "kv_lease_seconds": LEASE_SECONDS, "build_seconds": 800.0}
    host = ReplicaHost(
        config(redis_url, replica_id=name, engine="remote", engine_url=url, index_stride=32, **own)
    )
    async with running(host) as client:
        yield Peer(host, client, url)


def new_prompt(number: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, 500) for _ in range(num_tokens)]


async def computed(first: Peer, prompt: list[int]) -> tuple[PromptUsage, SplitHandover]:
    """Have the first part computed."""
    (said,) = await first.ask(prompt, max_tokens=1, split_id=7)
    handover = read_handover(said.usage.handover)
    assert handover is not None
    return said.usage, handover


async def undivided(first: Peer, prompt: list[int], num_choices: int = 1, **fields: Any) -> list[Any]:
    """Compute it all at one server, in a namespace of its own, so that nothing of it is cached."""
    said = await first.ask(prompt, num_choices, root=OTHER_ROOT, **fields)
    assert said[0].usage.num_cached_tokens == 0
    return [each.answer for each in said]


@pytest.mark.parametrize(
    ("num_choices", "fields"),
    [(1, {}), (1, {**SEEDED, "num_logprobs": 0}), (2, SEEDED)],
    ids=["greedy", "seeded", "two choices"],
)
async def test_a_prompt_that_is_handed_over_is_answered_as_if_it_were_not(
    peers: tuple[Peer, Peer], redis_url: str, num_choices: int, fields: dict[str, Any]
) -> None:
    first, second = peers
    for number, num_tokens in ((1, NUM_TOKENS), (2, 704), (3, 20)):
        prompt = new_prompt(100 * num_choices + 10 * len(fields) + number, num_tokens)
        num_before = second.num_taken()
        usage, handover = await computed(first, prompt)
        assert usage.num_cached_tokens == 0
        said = await second.ask(prompt, num_choices, handover=handover.packed(), **fields)
        assert [each.answer for each in said] == await undivided(first, prompt, num_choices, **fields)
        assert [each.usage.num_split_tokens for each in said] == [num_tokens, *[0] * (num_choices - 1)]
        assert second.num_taken() - num_before >= num_tokens - 1
        assert all((each.usage.num_cached_tokens or 0) >= num_tokens - 32 for each in said[1:])
    async with connect(redis_url) as redis:
        for peer in peers:
            await until(lambda: peer.holds(redis, prompt))  # noqa: B023


async def test_what_the_first_server_had_cached_is_said_and_what_the_second_has_is_not_taken(
    peers: tuple[Peer, Peer],
) -> None:
    first, second = peers
    prompt = new_prompt(5)
    for peer, num_cached in ((second, 0), (first, 352)):
        await peer.ask(prompt[:352] if num_cached else prompt[:192], max_tokens=1)
        usage, handover = await computed(first, prompt)
        assert usage.num_cached_tokens == num_cached
        num_before = second.num_taken()
        (said,) = await second.ask(prompt, handover=handover.packed())
        assert [said.answer] == await undivided(first, prompt)
        assert second.num_taken() - num_before == NUM_TOKENS - 192
        prompt = new_prompt(6)
        await second.ask(prompt[:192], max_tokens=1)


async def test_what_is_older_than_its_lease_is_computed_though_the_server_would_take_it(
    peers: tuple[Peer, Peer],
) -> None:
    """By then the first server has written other prompts there."""
    first, second = peers
    prompt = new_prompt(20)
    _, handover = await computed(first, prompt)
    num_before = second.num_taken()
    await asyncio.sleep(LEASE_SECONDS + 1)
    for number in range(30, 34):  # the lease ends in a step, and the blocks go to others
        await first.ask(new_prompt(number, 900), max_tokens=1)
    (said,) = await second.ask(prompt, handover=handover.packed())
    assert [said.answer] == await undivided(first, prompt)
    assert (said.usage.num_split_tokens, second.num_taken()) == (0, num_before)
    (again,) = await second.ask(prompt)
    assert again.answer == said.answer and again.usage.num_cached_tokens


async def test_params_that_lack_a_key_reach_no_server(peers: tuple[Peer, Peer]) -> None:
    """Without `remote_request_id` or blocks the whole second server would end."""
    first, second = peers
    num_before = second.num_taken()
    for number, gone in enumerate(("remote_request_id", "remote_block_ids", "remote_engine_id"), 40):
        prompt = new_prompt(number)
        _, handover = await computed(first, prompt)
        params = msgspec.json.decode(handover.params)
        del params[gone]
        torn = msgspec.structs.replace(handover, params=msgspec.json.encode(params))
        (said,) = await second.ask(prompt, handover=torn.packed())
        assert [said.answer] == await undivided(first, prompt)
    assert second.num_taken() == num_before


async def test_a_client_that_leaves_strands_nothing_and_nothing_is_taken_twice(
    peers: tuple[Peer, Peer],
) -> None:
    first, second = peers
    prompt = new_prompt(50)
    _, handover = await computed(first, prompt)
    number = await second.begin(prompt, handover=handover.packed(), max_tokens=200)
    await second.leave(number)
    (said,) = await second.ask(prompt, handover=handover.packed())
    assert [said.answer] == await undivided(first, prompt)
    assert said.usage.num_split_tokens == 0

    async def is_idle() -> bool:
        await first.ask(new_prompt(51, 20), max_tokens=1)  # leases end in steps
        peers_used = [await asyncio.to_thread(peer.metric, "vllm:kv_cache_usage_perc") for peer in peers]
        return peers_used == [0.0, 0.0]

    await until(is_idle)


async def test_a_first_server_that_dies_between_the_parts_costs_the_work_alone(
    peers: tuple[Peer, Peer], servers: Pair
) -> None:
    first, second = peers
    prompt = new_prompt(60)
    expected = await undivided(first, prompt)
    _, handover = await computed(first, prompt)
    os.killpg(servers.process.pid, signal.SIGKILL)
    (said,) = await second.ask(prompt, handover=handover.packed())
    assert [said.answer] == expected
    (again,) = await second.ask(prompt)
    assert again.answer == said.answer and again.usage.num_cached_tokens


def test_a_router_splits_prompts_between_vllm_servers(servers: Pair) -> None:
    """By the cost of both choices, while others decode."""
    of_both = {"engine": "remote", "kv_connector": "nixl"}
    settings = [
        {**of_both, "engine_url": servers.first, "role": "prefill", "kv_lease_seconds": LEASE_SECONDS},
        {**of_both, "engine_url": servers.second, "role": "decode", "kv_lease_seconds": LEASE_SECONDS},
    ]
    with local_stack(num_replicas=2, replica_settings=settings) as stack:
        model = httpx.get(f"{stack.url}/v1/models").json()["data"][0]["id"]

        def ask(text: str, max_tokens: int = 12) -> tuple[dict[str, Any], httpx.Headers]:
            body = {"model": model, "prompt": text, "max_tokens": max_tokens, "temperature": 0}
            answer = httpx.post(f"{stack.url}/v1/completions", json={**body, "ignore_eos": True}, timeout=120)
            assert answer.status_code == 200, answer.text
            return answer.json(), answer.headers

        words = random.Random(5)
        with busy(lambda number: ask(f"count {number}", 150)):
            for _ in range(20):
                text = " ".join(words.choices(("river", "stone", "lamp", "seven"), k=300))
                found, headers = ask(text)
                details = found["usage"]["prompt_tokens_details"]
                if details.get("split_tokens"):
                    break
        assert (headers["x-kvasir-computed-at"], headers["x-kvasir-replica"]) == ("replica-0", "replica-1")
        assert details["cached_tokens"] < 64
        assert "handover" not in json.dumps(found) and "kv_transfer_params" not in json.dumps(found)
        again, _ = ask(text)
        assert again["choices"][0]["text"] == found["choices"][0]["text"]


@contextmanager
def busy(ask: Callable[[int], object]) -> Iterator[None]:
    """While a dozen streams decode."""
    is_over = threading.Event()

    def go_on(number: int) -> None:
        while not is_over.is_set():
            ask(number)

    threads = [threading.Thread(target=go_on, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
