"""A stand-in for `vllm serve`: its routes over HTTP and its events over ZMQ, with a cache of a few blocks.

Computes nothing: the n-th token of an answer is a function of the prompt. Faults are switched on by name.
"""

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import tokenizers
import uvicorn
import zmq
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from replicas.toy_model import checkpoint_directory
from tests.certificates import Pair

BLOCK_SIZE = 16
NUM_BLOCKS = 24
SERVED_NAME = "served"


class StandIn:
    def __init__(self, tls: Pair | None = None) -> None:
        self.fault = ""
        self.error: tuple[int, str, dict[str, str]] | None = None
        """Status, words and headers of what it answers to every prompt."""
        self.served_name = SERVED_NAME
        self.other_names: list[str] = []
        self.adapters = {"tuned": "/adapters/tuned"}
        """Where each lies."""
        self.num_lists = 0
        """How often it was asked for its models."""
        self.started_at = 1000.0
        self.key: str | None = None
        self.says_cached: Callable[[int], object] = lambda num_cached: num_cached
        self.has_events = True
        self.event_addresses: dict[str, str] = {}
        """What it says of where its events go."""
        self.is_mute = False
        """Whether none of its events reach anybody."""
        self.is_old = False
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_open = 0
        self.offered: dict[str, Any] | None = None
        """What it says to the server of a split's second part."""
        self.num_others: float = 2
        """Requests of other clients that run."""
        self.shift_tokens = 0
        self._held: OrderedDict[int, None] = OrderedDict()
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self.event_port = self._publisher.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.next_number = 0
        self.kept: dict[int, bytes] = {}
        self.num_lost = 0
        """How many of the next batches never reach a subscriber."""
        self.replays = threading.Event()
        """Cleared while questions for replays wait."""
        self.replays.set()
        self.dropped: set[int] = set()
        """Batches that the next replay leaves out."""
        self.tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint_directory(None) / "tokenizer.json"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        config = uvicorn.Config(
            Starlette(routes=self.routes()),
            host="127.0.0.1",
            port=self.port,
            log_config=None,  # the loggers are those of all tests
            ws="none",
            lifespan="off",
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else tls.key,
        )
        self._http = uvicorn.Server(config)
        self._stops = threading.Event()
        self._threads = [
            threading.Thread(target=self._http.run, daemon=True),
            threading.Thread(target=self._answer_replays, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def routes(self) -> list[Route]:
        return [
            Route("/health", lambda _: PlainTextResponse("")),
            Route("/v1/models", self._models),
            Route("/metrics", self._metrics),
            Route("/version", lambda _: JSONResponse({"version": "0.30.0"})),
            Route("/kv_event_sources", self._sources),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
        ]

    def close(self) -> None:
        self._http.should_exit = self._http.force_exit = True
        self._stops.set()
        self.replays.set()
        for thread in self._threads:
            thread.join()
        self._context.destroy(linger=0)

    # Events.

    def publish(self, *events: dict[str, Any] | msgspec.Raw) -> None:
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        self.publish_raw(payload)

    def publish_raw(self, payload: bytes) -> None:
        if self.is_mute:
            return
        number, self.next_number = self.next_number, self.next_number + 1
        self.kept[number] = payload
        if self.num_lost:
            self.num_lost -= 1
            return
        self.send(b"", number.to_bytes(8), payload)

    def send(self, *frames: bytes) -> None:
        """Publish whatever it is."""
        self._publisher.send_multipart(frames)

    def restart_events(self) -> None:
        self.next_number = 0
        self.kept.clear()

    def forget(self) -> None:
        """Empty the cache and tell nobody."""
        self._held.clear()

    def _answer_replays(self) -> None:
        while not self._stops.is_set():
            if not self._router.poll(50):
                continue
            self.replays.wait()
            client, _, first = self._router.recv_multipart()
            dropped, self.dropped = self.dropped, set()
            for number, payload in sorted(self.kept.items()):
                if number >= int.from_bytes(first) and number not in dropped:
                    self._router.send_multipart([client, b"", b"", number.to_bytes(8), payload])
            self._router.send_multipart([client, b"", b"", (-1).to_bytes(8, signed=True), b""])

    # HTTP.

    def _models(self, _: Request) -> Response:
        self.num_lists += 1
        if self.fault == "redirects":
            return RedirectResponse("http://127.0.0.1:1/v1/models")
        if self.fault == "html":
            return HTMLResponse("<html>a proxy</html>")
        if self.fault == "drips":
            return StreamingResponse(_endless(b" "))
        if self.fault == "floods":
            return StreamingResponse(_endless(b" " * 2**20))
        if self.fault == "is loading":
            return JSONResponse({"data": []}, 503)
        names = [self.served_name, *self.other_names]
        models = [
            {"id": name, "root": "/models/toy", "parent": None, "max_model_len": 512, "created": time.time()}
            for name in names
        ]
        adapters = [
            {"id": name, "root": root, "parent": self.served_name} for name, root in self.adapters.items()
        ]
        return JSONResponse({"data": [*models, *adapters]})

    async def _metrics(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        if self.fault == "hangs":
            await asyncio.sleep(60)
        if self.fault == "drips":
            return StreamingResponse(_endless(b" "))
        return PlainTextResponse(
            f"process_start_time_seconds {self.started_at}\n"
            f'vllm:num_requests_running{{engine="0"}} {self.num_others + self.num_open}\n'
            'vllm:num_requests_waiting{engine="0"} 1\n'
            'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
            f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",enable_prefix_caching="True",engine="0",'
            f'num_gpu_blocks="{NUM_BLOCKS + 1}"}} 1.0\n'
        )

    def _sources(self, _: Request) -> Response:
        if self.is_old:
            return JSONResponse({"detail": "Not Found"}, 404)
        if not self.has_events:
            return JSONResponse({})
        return JSONResponse(
            {
                "0": {
                    "enable_kv_cache_events": True,
                    "endpoint": f"tcp://*:{self.event_port}",
                    "replay_endpoint": f"tcp://*:{self.replay_port}",
                    "topic": "",
                    **self.event_addresses,
                }
            }
        )

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        tokens = self.tokenizer.encode(body["prompt"], add_special_tokens=False).ids
        return JSONResponse({"tokens": [*tokens[:-1], tokens[-1] + self.shift_tokens]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.error is not None:
            status, message, headers = self.error
            said = {"message": message, "type": "Odd", "param": None, "code": status}
            return JSONResponse({"error": said}, status, headers)
        if body.get("model", self.served_name) not in (self.served_name, *self.other_names, *self.adapters):
            return JSONResponse({"error": {"message": "The model does not exist."}}, 404)
        match self.fault:
            case "full":
                return JSONResponse({"error": {"message": "too many requests"}}, 503)
            case "refuses":
                return JSONResponse({"error": {"message": "temperature is too high"}}, 400)
            case "fails":
                return PlainTextResponse("Internal Server Error", 500)
            case "escapes":
                said = {"message": "no\r\n2026 INFO forged \x1b[31m\u2028", "type": "a\nb"}
                return JSONResponse({"error": said}, 400)
            case "fails and drips":
                return StreamingResponse(_endless(b" "), 500)
            case "redirects":
                return RedirectResponse("http://127.0.0.1:1/")
            case "html":
                return HTMLResponse("<html>a proxy</html>")
        if not body["stream"]:
            return self._whole(body)
        return StreamingResponse(self._answer(body), media_type="text/event-stream")

    def _whole(self, body: dict[str, Any]) -> Response:
        match self.fault:
            case "never answers":
                return StreamingResponse(self._endless_answer(), media_type="application/json")
            case "nonsense":
                return JSONResponse({"choices": [{"token_ids": "seven"}], "kv_transfer_params": self.offered})
            case "no end":
                return JSONResponse({"kv_transfer_params": self.offered})
            case "endless line":
                return StreamingResponse(_endless(b" " * 2**20), media_type="application/json")
            case "error inside":
                return JSONResponse(
                    {"error": {"message": "out of memory"}, "kv_transfer_params": self.offered}
                )
        num_cached = self.store(body["prompt"], body["cache_salt"], body.get("session_id"))
        choices = [_choice(body, number, True) for number in range(body["max_tokens"])]
        details = {"cached_tokens": num_cached}
        usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": details}
        return JSONResponse({"choices": choices, "usage": usage, "kv_transfer_params": self.offered})

    async def _endless_answer(self) -> AsyncIterator[bytes]:
        self.num_open += 1
        try:
            async for piece in _endless(b" "):
                yield piece
        finally:
            self.num_open -= 1

    async def _answer(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.num_open += 1
        try:
            if self.fault == "slow":
                await asyncio.sleep(1)
            prompt = body["prompt"]
            num_cached = self.store(prompt, body["cache_salt"], body.get("session_id"))
            for number in range(body["max_tokens"] + (self.fault == "too many")):
                if self.fault == "breaks off" and number == 2:
                    raise ConnectionError("on purpose")
                if self.fault == "nonsense" and number == 1:
                    yield 'data: {"choices": [{"token_ids": "seven"}]}\n\n'
                if self.fault == "negative" and number == 1:
                    yield 'data: {"choices": [{"token_ids": [-1]}]}\n\n'
                if self.fault == "deep" and number == 1:
                    yield f'data: {{"usage": {"[" * 100_000}\n\n'
                if self.fault == "error inside" and number == 1:
                    yield 'data: {"error": {"message": "out of memory", "code": 400}}\n\n'
                if self.fault == "error first":
                    yield 'data: {"object": "error", "message": "boom", "code": 400}\n\n'
                if self.fault == "endless line" and number == 1:
                    yield "data: {" + "x" * 3_000_000
                if self.fault in ("endless empties", "endless comments") and number == 1:
                    is_empty = self.fault == "endless empties"
                    async for piece in _endless(
                        b"data: {}\n\n" * 100 if is_empty else b":%s\n" % bytes(2**20)
                    ):
                        yield piece.decode()
                if self.fault == "never ends" and number == 1:
                    await asyncio.sleep(60)
                is_last = number + 1 == body["max_tokens"] and self.fault != "no end"
                num_choices = 3 if self.fault == "three choices" else 1
                yield _event(choices=[_choice(body, number, is_last)] * num_choices)
            said = self.says_cached(num_cached)
            details = None if said is None else {"cached_tokens": said}
            usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": details}
            yield _event(choices=[], usage=usage)
            yield "data: [DONE]\n\n"
        finally:
            self.num_open -= 1

    def store(self, prompt: list[int], salt: str, session: str | None) -> int:
        """Store the prompt's full blocks, least recently used out first; returns the tokens it found."""
        num_full = len(prompt) // BLOCK_SIZE
        hashes = [chain_hash(salt, prompt[: (place + 1) * BLOCK_SIZE]) for place in range(num_full)]
        num_found = 0
        while num_found < num_full and hashes[num_found] in self._held:
            self._held.move_to_end(hashes[num_found])
            num_found += 1
        new = hashes[num_found:]
        gone = []
        while len(self._held) + len(new) > NUM_BLOCKS:
            gone.append(self._held.popitem(last=False)[0])
        self._held.update(dict.fromkeys(new))
        if new:
            removed = [{"type": "BlockRemoved", "block_hashes": [each], "medium": "GPU"} for each in gone]
            stored = stored_event(
                new,
                prompt[num_found * BLOCK_SIZE : num_full * BLOCK_SIZE],
                parent=hashes[num_found - 1] if num_found else None,
                salt=salt if not num_found else None,
                session_id=session,
            )
            self.publish(*removed, stored)
        # At least one token is computed.
        return min(num_found, (len(prompt) - 1) // BLOCK_SIZE) * BLOCK_SIZE


async def _endless(piece: bytes) -> AsyncIterator[bytes]:
    while True:
        yield piece
        await asyncio.sleep(0.01)


def stored_event(
    hashes: list[int], tokens: list[int], *, parent: int | None, salt: str | None, **fields: Any
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "token_ids": tokens,
        "block_size": BLOCK_SIZE,
        "parent_block_hash": parent,
        "medium": "GPU",
        "extra_keys": [[salt], *[None] * (len(hashes) - 1)] if salt else None,
        "group_idx": 0,
        "lora_id": None,
        **fields,
    }


def token_of(prompt: list[int], number: int) -> int:
    return 3 + (sum(prompt) + 7 * number) % 1000


def _choice(body: dict[str, Any], number: int, is_last: bool) -> dict[str, Any]:
    token = token_of(body["prompt"], number)
    choice: dict[str, Any] = {
        "text": "x",
        "token_ids": [token],
        "finish_reason": "length" if is_last else None,
    }
    if number == 0:
        choice["prompt_token_ids"] = body["prompt"]
    if "logprobs" in body:
        name = f"token_id:{token}"
        choice["logprobs"] = {
            "tokens": [name],
            "token_logprobs": [-0.5],
            "top_logprobs": [{"token_id:9": -1.5, name: -0.5}],
        }
    return choice


def _event(**fields: Any) -> str:
    return f"data: {json.dumps({'id': 'cmpl-1', **fields})}\n\n"


def chain_hash(salt: str, prefix: list[int]) -> int:
    digest = hashlib.sha256(salt.encode() + json.dumps(prefix).encode()).digest()
    return int.from_bytes(digest[-8:])
