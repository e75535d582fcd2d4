"""A stand-in for SGLang: routes and events as its sources have them (0.5.23), with a cache of a few pages."""

import json
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from replicas.protocol.blocks import BlockHash, hash_blocks
from tests.replicas.builders import ROOT
from tests.replicas.remote_engine.stand_in import StandIn, chain_hash, token_of

NUM_TOKENS = 24 * 64


class SglangStandIn(StandIn):
    """Evicts ends of chains only, as a radix tree does."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.capacity = NUM_TOKENS
        """In tokens; it may be less than what is told."""
        self.info: dict[str, Any] = {}
        """What differs from an ordinary description."""
        self._parents: OrderedDict[int, int | None] = OrderedDict()
        super().__init__()

    def routes(self) -> list[Route]:
        return [
            Route("/health", lambda _: PlainTextResponse("")),
            Route("/v1/models", self._models),
            Route("/server_info", self._server_info),
            Route("/v1/loads", self._loads),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/generate", self.complete, methods=["POST"]),
        ]

    def _server_info(self, _: Request) -> Response:
        events = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": self.event_port,
            "replay_endpoint_port_base": self.replay_port,
            "topic": "",
            "block_size": self.page_size,
            "dp_size": 1,
        }
        info = {
            "model_path": "/models/toy",
            "page_size": self.page_size,
            "max_total_num_tokens": NUM_TOKENS,
            "startup_time": {"scheduler_e2e": self.started_at},
            "kv_events": events if self.has_events else None,
            **self.info,
        }
        return JSONResponse(info)

    def _loads(self, request: Request) -> Response:
        assert request.query_params["include"] == "core"
        load = {"dp_rank": 0, "num_running_reqs": self.num_open + self.num_others, "num_waiting_reqs": 1}
        return JSONResponse({"loads": [{**load, "token_usage": 0.25}]})

    async def _answer(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.num_open += 1
        try:
            prompt, parameters = body["input_ids"], body["sampling_params"]
            num_cached = self._keep(prompt, body["cache_salt"])
            if self.fault == "error inside":
                yield _event(error={"message": "out of memory", "code": 500})
            if self.fault == "bad request":
                yield _event(error={"message": "the prompt is too long", "code": 400})
            output: list[int] = []
            for number in range(parameters["max_new_tokens"]):
                if self.fault == "breaks off" and number == 2:
                    raise ConnectionError("on purpose")
                output.append(token_of(prompt, number))
                is_last = number + 1 == parameters["max_new_tokens"] and self.fault != "no end"
                finish = {"type": "length", "length": number + 1} if is_last else None
                if self.fault == "aborts":
                    finish = {"type": "abort", "message": "the queue is full", "status_code": 503}
                meta: dict[str, Any] = {"finish_reason": finish, "prompt_tokens": len(prompt)}
                meta["cached_tokens"] = self.says_cached(num_cached)
                is_incremental = self.info.get("incremental_streaming_output")
                shown = output[-1:] if is_incremental else output
                if body.get("return_logprob"):
                    meta["output_token_logprobs"] = [(-0.5, token, None) for token in shown]
                    meta["output_top_logprobs"] = [[(-0.5, token, None), (-1.5, 9, None)] for token in shown]
                yield _event(text=None, output_ids=shown, meta_info=meta)
            yield "data: [DONE]\n\n"
        finally:
            self.num_open -= 1

    def whole_blocks(self, prompts: list[list[int]], size: int) -> set[BlockHash]:
        """Return the blocks of prompts under ROOT of which all pages are held."""
        whole = set()
        for prompt in prompts:
            for place, block_hash in enumerate(hash_blocks(ROOT, prompt, size)):
                if self._signed(ROOT.hex(), prompt[: (place + 1) * size]) in self._parents:
                    whole.add(block_hash)
        return whole

    def _signed(self, salt: str, prefix: list[int]) -> int:
        found = chain_hash(salt, prefix)
        return found - 2**64 if found >= 2**63 else found

    def _keep(self, prompt: list[int], salt: str) -> int:
        """Store the prompt's pages; returns the tokens it found."""
        size = self.page_size
        hashes = [self._signed(salt, prompt[:end]) for end in range(size, len(prompt) + 1, size)]
        num_found = next((n for n, each in enumerate(hashes) if each not in self._parents), len(hashes))
        new, gone = hashes[num_found:], []
        while (len(self._parents) + len(new)) * size > self.capacity:
            inner = set(self._parents.values())
            gone.append(next(each for each in self._parents if each not in inner and each not in hashes))
            del self._parents[gone[-1]]
        if gone:
            self.publish({"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU"})
        if new:
            parent = hashes[num_found - 1] if num_found else None
            self.publish(
                {
                    "type": "BlockStored",
                    "block_hashes": new,
                    "parent_block_hash": parent,
                    "token_ids": prompt[num_found * size : len(hashes) * size],
                    "block_size": size,
                    "medium": "GPU",
                    "cache_salt": salt,
                }
            )
        for place, each in enumerate(hashes):
            self._parents.setdefault(each, hashes[place - 1] if place else None)
        for each in reversed(hashes):
            self._parents.move_to_end(each)
        return min(num_found, (len(prompt) - 1) // size) * size


def _event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"
