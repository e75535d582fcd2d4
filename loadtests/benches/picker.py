"""Measures the endpoint picker: time from the end of a request's body to its destination, at a set rate.

A process of its own has the picker, with the toy model's tokenizer and template, and two replicas that are
cards alone. This process is the gateway: it sends requests of about 8,000 tokens as Envoy does, streamed, and
ends each when it has been told where it goes. The gateway's own work is in the times too; what a request
without a prompt takes is printed beside them. The two processes have a core each. Processor time is
that of the picker for a request: with gRPC; without it in this process, one request after the other; and
gRPC's alone for the same messages without a decision.

    python -m loadtests.benches.picker
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import uvloop
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp
from tokenizers import Tokenizer

from loadtests.benches.harness import WORDS, bench_options
from loadtests.figures import cpu_seconds, milliseconds, print_header
from replicas.checkpoints.weights import tokenizer_bundle
from replicas.protocol.status import ModelCard, ReplicaId
from replicas.toy_model import toy_model_path
from router.api.context import ApiContext
from router.api.gemini.paths import GENERATE_CONTENT
from router.api.prepare_in_worker import prepare_in_worker
from router.app import PREPARES, create_gateway_app
from router.config import RouterConfig
from router.dispatch.dispatcher import Dispatcher
from router.features.explanations.feature import Explanations
from router.memory import return_large_blocks, spare_long_lived_objects
from router.observation.metrics import RouterMetrics
from router.picker import ext_proc_pb2 as pb
from router.picker.endpoint import picked_endpoints
from router.picker.messages import METHOD, SERVICE, Body, decode, destined, go_on
from router.picker.server import Call, Picker
from router.picker.stream import GatewayStream, Tally
from router.prompt.catalog import ModelCatalog
from router.routing.cost import CostParameters
from router.routing.table import RoutingTable

MODEL = "toy"
BLOCK_SIZE = 16
NUM_TOKENS = 8000
NUM_MESSAGES = 16
NUM_CONVERSATIONS = 50
PIECE_BYTES = 16_000
PICKER_CORE, GATEWAY_CORE = 0, 1


def new_app(config: RouterConfig) -> ASGIApp:
    rng = random.Random(0)
    bundle = tokenizer_bundle(toy_model_path())
    card = ModelCard(MODEL, "f" * 64, "remote", BLOCK_SIZE, 2**16, 2**15, 4096, max_running=4096)
    catalog = ModelCatalog(rng.randbytes(32), cache_bytes=2**26, chain_bytes=2**25)
    catalog.add(card, bundle)
    table = RoutingTable(config.policy, CostParameters(), rng, clock=time.monotonic)
    for number in (1, 2):
        own = replace(card, endpoint=f"10.0.0.{number}:8000")
        table.add_replica(ReplicaId(f"replica-{number}"), own, config.index_stride)
    context = ApiContext(
        config=config,
        catalog=catalog,
        dispatcher=Dispatcher(table, lambda _: None, rng=rng),
        metrics=RouterMetrics(CollectorRegistry()),
        num_replicas=lambda model: 2,
        rng=rng,
        prepare_beside=prepare_in_worker,
        index_of=table.index,
    )
    context.add(Explanations(context))
    prepares = {path: prepare for path, prepare in PREPARES.items() if path != GENERATE_CONTENT}
    return create_gateway_app(context, picked_endpoints(context, prepares))


async def serve() -> None:
    """The picker, until its process is killed. Prints its port."""
    config = RouterConfig(picker_port=0)
    picker = Picker(new_app(config), config, lambda: True)
    await picker.bind()
    await picker.start()
    undecided = new_undecided_server()
    undecided_port = undecided.add_insecure_port("127.0.0.1:0")
    await undecided.start()
    spare_long_lived_objects()
    print(picker.port, undecided_port, flush=True)
    await asyncio.Event().wait()


def new_undecided_server() -> grpc.aio.Server:
    """Answer the same messages with one destination for all: the least that gRPC costs."""

    async def process(messages: AsyncIterator[bytes], call: Call) -> None:
        body = b""
        async for encoded in messages:
            message = decode(encoded)
            if message.is_response:
                await call.write(go_on(message))
                return
            if isinstance(message.part, Body):
                body += message.part.content
                if message.part.is_last:
                    for each in destined("10.0.0.1:8000", (), body, ends=True):
                        await call.write(each)

    server = grpc.aio.server()
    handler = {METHOD: grpc.stream_stream_rpc_method_handler(process)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handler),))
    return server


class Prompts:
    """Bodies by kind. Each conversation has its own history, of which the last message is new."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(toy_model_path() / "tokenizer.json"))
        self._rng = random.Random(1)
        per_word = self._num_tokens(self._words(2000)) / 2000
        self._num_words = int(NUM_TOKENS / NUM_MESSAGES / per_word)
        self._histories = [
            [self._message(number) for number in range(NUM_MESSAGES - 1)] for _ in range(NUM_CONVERSATIONS)
        ]
        ids = [self._rng.randrange(300, 2000) for _ in range(NUM_TOKENS)]
        self._ids = [[*ids[:-40], *self._rng.choices(ids, k=40)] for _ in range(NUM_CONVERSATIONS)]

    def _words(self, number: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=number))

    def _num_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text).ids)

    def _message(self, number: int) -> dict[str, str]:
        return {"role": "assistant" if number % 2 else "user", "content": self._words(self._num_words)}

    def short(self, number: int) -> tuple[str, bytes]:
        return "/v1/completions", _body(prompt=[300 + number % 1000] * 16)

    def token_ids(self, number: int) -> tuple[str, bytes]:
        return "/v1/completions", _body(prompt=self._ids[number % NUM_CONVERSATIONS])

    def conversation(self, number: int) -> tuple[str, bytes]:
        history = self._histories[number % NUM_CONVERSATIONS]
        return "/v1/chat/completions", _body(messages=[*history, self._message(0)])

    def new_text(self, number: int) -> tuple[str, bytes]:
        messages = [self._message(number) for number in range(NUM_MESSAGES)]
        return "/v1/chat/completions", _body(messages=messages)


def _body(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, "max_tokens": 16, **fields}).encode()


def messages_of(path: str, body: bytes) -> Iterator[bytes]:
    """Yield a request as a gateway sends it: its headers, and its body in pieces."""
    sent = {":method": "POST", ":path": path, "content-type": "application/json"}
    listed = pb.HeaderMap(headers=[{"key": key.encode(), "raw_value": sent[key].encode()} for key in sent])
    head = pb.Headers(headers=listed.SerializeToString())
    yield pb.Request(request_headers=head).SerializeToString()
    for start in range(0, len(body), PIECE_BYTES):
        is_last = start + PIECE_BYTES >= len(body)
        part = pb.Body(body=body[start : start + PIECE_BYTES], end_of_stream=is_last)
        yield pb.Request(request_body=part).SerializeToString()


END: bytes = pb.Request(response_headers=pb.Headers(end_of_stream=True)).SerializeToString()
"""The head of an answer without a body."""


async def cpu_without_grpc(make: Callable[[int], tuple[str, bytes]], number: int) -> float:
    """Return this process's processor time for a request, from its messages to its destination and end."""
    app, told = new_app(RouterConfig(picker_port=0)), asyncio.Event()

    async def write(message: bytes) -> None:
        told.set()

    async def ask(path: str, body: bytes) -> None:
        told.clear()
        first, *pieces = messages_of(path, body)
        stream = GatewayStream(decode(first), write, Tally())
        serving = asyncio.ensure_future(app(stream.scope(), stream.receive, stream.send))
        for piece in pieces:
            await stream.take(decode(piece))
        await told.wait()
        await stream.take(decode(END))
        await serving

    for path, body in map(make, range(NUM_CONVERSATIONS)):
        await ask(path, body)
    asked = [make(each) for each in range(number)]
    began = time.process_time()
    for path, body in asked:
        await ask(path, body)
    return (time.process_time() - began) / number


class Gateway:
    def __init__(self, port: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._process: Any = self._channel.stream_stream(f"/{SERVICE}/{METHOD}", None, None)

    async def ask(self, path: str, body: bytes) -> float:
        """Returns the seconds from its last byte to its destination."""
        sent_at = 0.0

        async def messages() -> AsyncIterator[bytes]:
            nonlocal sent_at
            for message in messages_of(path, body):
                sent_at = time.perf_counter()
                yield message
            await has_told.wait()
            yield END

        has_told = asyncio.Event()
        told = aiter(self._process(messages()))
        first = await anext(told)
        seconds = time.perf_counter() - sent_at
        if not first.startswith(b"\x0a"):
            raise RuntimeError(f"it was not told a destination: {first[:200]!r}")
        has_told.set()
        async for _ in told:
            pass
        return seconds

    async def close(self) -> None:
        await self._channel.close(None)


async def at_rate(
    port: int, pid: int, make: Callable[[int], tuple[str, bytes]], rate: float, seconds: float
) -> tuple[Sequence[float], float]:
    """Ask in an open loop. Returns the times, and the picker's processor time for each request."""
    gateway, rng = Gateway(port), random.Random(2)
    asked = [make(number) for number in range(int(rate * seconds))]
    times: list[float] = []
    warm_up = [make(number) for number in range(NUM_CONVERSATIONS)]
    for path, body in warm_up:
        await gateway.ask(path, body)

    async def ask(path: str, body: bytes) -> None:
        times.append(await gateway.ask(path, body))

    cpu, began, due = cpu_seconds(pid), time.perf_counter(), 0.0
    async with asyncio.TaskGroup() as group:
        for path, body in asked:
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            group.create_task(ask(path, body))
    await gateway.close()
    return times, (cpu_seconds(pid) - cpu) / len(asked)


async def measure(options: argparse.Namespace, port: int, undecided: int, pid: int) -> None:
    prompts = Prompts()
    spare_long_lived_objects()
    kinds = {
        "16 token ids (all but a prompt)": prompts.short,
        "8,000 token ids: no rendering, no tokenising": prompts.token_ids,
        "8,000 tokens in 16 messages, the last one new": prompts.conversation,
        "8,000 tokens in 16 messages, all new": prompts.new_text,
    }
    for name, make in kinds.items():
        times, cpu = await at_rate(port, pid, make, options.rate, options.seconds)
        _, least = await at_rate(undecided, pid, make, options.rate, options.seconds)
        own = await cpu_without_grpc(make, 200)
        shown = f"CPU {cpu * 1e3:5.2f} ms, without gRPC {own * 1e3:5.2f} ms, gRPC alone {least * 1e3:5.2f} ms"
        print(f"{name:48} {milliseconds(times)}   {shown}", flush=True)


def main() -> None:
    parser = bench_options(__doc__)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each kind of prompt")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    return_large_blocks()
    if options.serve:
        os.sched_setaffinity(0, {PICKER_CORE})  # before gRPC has threads
        uvloop.run(serve())
        return
    print_header(f"Endpoint picker, {options.rate:g} requests a second")
    command = [sys.executable, "-m", "loadtests.benches.picker", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port, undecided = map(int, process.stdout.readline().split())
            os.sched_setaffinity(0, {GATEWAY_CORE})
            asyncio.run(measure(options, port, undecided, process.pid))
        finally:
            process.kill()


if __name__ == "__main__":
    main()
