"""CauseAsker: asks a router for prompts and has it explain each, for benchmarks that know what was done.

Owns what counts as a right explanation: the cause that leads, and its place, which is all that could have
been read, at the replica that had it.
"""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx

from loadtests.benches.harness import WORDS
from loadtests.stacks.local_stack import LocalStack

MODEL = "toy_model"
PROMPT_TOKENS = 200
PATIENCE_SECONDS = 120.0
EXPLANATION_SECONDS = 20.0
SETTLE_SECONDS = 0.4
BUSY_SECONDS = 1.5
MAX_SHOWN = 3

Explanation = dict[str, Any]
"""One prompt's explanation, as in `GET /v1/cache/explain/{id}`."""


@dataclass(slots=True)
class Said:
    """The answers where `cause` was expected. The first `MAX_SHOWN` wrong ones are kept."""

    cause: str
    block_size: int
    causes: Counter[str] = field(default_factory=Counter)
    num_places: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def num_scenes(self) -> int:
        return self.causes.total()

    @property
    def share(self) -> float:
        """Share of scenes with the right cause and place."""
        return min(self.causes[self.cause], self.num_places) / max(1, self.num_scenes)

    def take(
        self,
        explanation: Explanation | None,
        replica: str | None = None,
        path: str | None = None,
        num_new: int = 0,
    ) -> None:
        """`replica` is the one that had the prompt, `path` what the client has changed. Of the first
        tokens up to `num_new` are new."""
        if explanation is None:
            self.causes["nothing"] += 1
            return
        self.causes[explanation["cause"]] += 1
        is_there = self._is_placed(explanation, replica, num_new)
        if path is not None:
            place = explanation["place"]
            is_there &= place is not None and path in (place["path"], place["kind"])
        self.num_places += is_there
        if not (is_there and explanation["cause"] == self.cause) and len(self.wrong) < MAX_SHOWN:
            self.wrong.append(json.dumps({"of": replica, **explanation}))

    def _is_placed(self, explanation: Explanation, replica: str | None, num_new: int) -> bool:
        num_tokens, cached = explanation["prompt_tokens"], explanation["cached_tokens"]
        reusable = max(0, num_tokens - 1) // self.block_size * self.block_size
        spans = explanation["spans"]
        if sum(span["end"] - span["start"] for span in spans) != num_tokens - cached:
            return False
        if self.cause == "hit":
            return bool(cached == reusable)
        if self.cause == "below_a_block":
            return [(span["cause"], span["end"]) for span in spans] == [("below_a_block", num_tokens)]
        is_new = spans[0]["cause"] == "never_cached" and spans[0]["end"] <= num_new
        lost = [span for span in spans[is_new:] if span["start"] < reusable]
        return all(
            span["cause"] == self.cause and (replica is None or span["replica"] == replica) for span in lost
        )


class Asker:
    """`key` is one that may explain."""

    def __init__(self, stack: LocalStack, key: str, block_size: int, seed: int) -> None:
        self.stack = stack
        self.block_size = block_size
        self.rng = random.Random(seed)
        self._headers = {"authorization": f"Bearer {key}"}
        self._client = httpx.Client(verify=False, timeout=PATIENCE_SECONDS, headers=self._headers)
        self._ids = count()
        self.was_lease_refused = False
        """For the prompt that `ask` was last called with."""

    def close(self) -> None:
        self._client.close()

    def said(self, cause: str) -> Said:
        return Said(cause, self.block_size)

    def tokens(self, num_tokens: int = PROMPT_TOKENS) -> list[int]:
        return [self.rng.randrange(3, 500) for _ in range(num_tokens)]

    def chat(self, num_words: int = 120) -> dict[str, Any]:
        """Return a conversation with a tool, as a body."""

        def words(num: int) -> str:
            return " ".join(self.rng.choice(WORDS) for _ in range(num))

        function = {"name": f"do_{self.rng.randrange(10**6)}", "description": words(20), "parameters": {}}
        return {
            "messages": [
                {"role": "system", "content": words(num_words)},
                {"role": "user", "content": words(30)},
                {"role": "assistant", "content": words(30)},
                {"role": "user", "content": words(10)},
            ],
            "tools": [{"type": "function", "function": function}],
        }

    def ask(self, prompt: list[int] | dict[str, Any], **fields: Any) -> Explanation | None:
        """Returns how the router explains it."""
        request_id = self._request_id()
        body = self._body(prompt, fields)
        path = "chat/completions" if "messages" in body else "completions"
        answer = self._client.post(
            f"{self.stack.url}/v1/{path}", json=body, headers={"x-request-id": request_id}
        )
        if answer.status_code != 200:
            raise RuntimeError(f"a prompt was answered by {answer.status_code}: {answer.text[:500]}")
        details = answer.json()["usage"].get("prompt_tokens_details") or {}
        self.was_lease_refused = any(
            lease["status"] == "refused" for lease in details.get("cache_leases", ())
        )
        return self._explanation(request_id)

    def ask_all(self, prompts: Sequence[list[int]], **fields: Any) -> list[Explanation | None]:
        """All at once; in the order of the prompts."""
        request_ids = [self._request_id() for _ in prompts]

        async def post() -> None:
            async with self._async_client() as client:
                await asyncio.gather(
                    *(
                        client.post(
                            f"{self.stack.url}/v1/completions",
                            json=self._body(prompt, fields),
                            headers={"x-request-id": request_id},
                        )
                        for request_id, prompt in zip(request_ids, prompts, strict=True)
                    )
                )

        asyncio.run(post())
        return [self._explanation(request_id) for request_id in request_ids]

    @contextmanager
    def busy(self, beginning: list[int], num_answers: int, num_tokens: int) -> Iterator[None]:
        """Keep `num_answers` answers of `num_tokens` tokens running, to prompts with this beginning."""
        prompts = [beginning + self.tokens(4) for _ in range(num_answers)]
        fields = {"max_tokens": num_tokens, "ignore_eos": True}
        has_ended = threading.Event()

        async def keep_on(client: httpx.AsyncClient, prompt: list[int]) -> None:
            while not has_ended.is_set():
                await client.post(f"{self.stack.url}/v1/completions", json=self._body(prompt, fields))

        async def keep_all_on() -> None:
            async with self._async_client() as client:
                await asyncio.gather(*(keep_on(client, prompt) for prompt in prompts))

        thread = threading.Thread(target=lambda: asyncio.run(keep_all_on()))
        thread.start()
        try:
            time.sleep(BUSY_SECONDS)
            yield
        finally:
            has_ended.set()
            thread.join()

    def _async_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(verify=False, timeout=PATIENCE_SECONDS, headers=self._headers)

    def _request_id(self) -> str:
        return f"{id(self):x}-{next(self._ids)}"

    def _body(self, prompt: list[int] | dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        own = prompt if isinstance(prompt, dict) else {"prompt": prompt}
        return {"model": MODEL, "max_tokens": 1, "temperature": 0, **own, **fields}

    def _explanation(self, request_id: str) -> Explanation | None:
        """It is remembered when the request has ended, a moment after the answer."""
        deadline = time.monotonic() + EXPLANATION_SECONDS
        while time.monotonic() < deadline:
            answer = self._client.get(f"{self.stack.url}/v1/cache/explain/{request_id}")
            if answer.status_code == 200 and answer.json()["prompts"]:
                explanation: Explanation = answer.json()["prompts"][0]
                return explanation
            time.sleep(0.02)
        return None

    def settle(self) -> None:
        """Until the index has heard of all."""
        time.sleep(SETTLE_SECONDS)

    def push_out(self, num_tokens: int, each: int = 500) -> None:
        """Fill the cache with prompts of `num_tokens` tokens in all."""
        for _ in range(-(-num_tokens // each)):
            self._client.post(
                f"{self.stack.url}/v1/completions", json=self._body(self.tokens(each), {})
            ).raise_for_status()
        self.settle()
