"""Streaming clients of a storm: greedy answers, each of which is compared with what it was in calm.

Owns the prompts, the sending and the records. A client learns nothing of faults but what any client sees.
"""

import asyncio
import json
import random
import time
import uuid
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from loadtests.load.streaming import Connection, StreamCut
from loadtests.storm.verdict import Failure, StormRequest
from loadtests.workloads.prompts import SAMPLE_WORDS

PATH = "/v1/chat/completions"
PAUSE_SECONDS = 0.2
"""How long a client waits after a refusal."""


class StormClients:
    """`requests` has every attempt, those that still run at the end of their time included."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        num_prompts: int,
        num_tokens: int,
        num_uncached_words: int = 0,
        patience_seconds: float,
        seed: int,
    ) -> None:
        address = urlsplit(url)
        assert address.hostname is not None and address.port is not None
        self._host, self._port = address.hostname, address.port
        self.model = model
        self.patience_seconds = patience_seconds
        self.bodies = bodies_of(model, num_prompts, num_tokens, seed, num_uncached_words)
        self._finds_nothing = num_uncached_words > 0
        self.references: list[str] = []
        self.requests: list[StormRequest] = []
        self._zero = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._zero

    async def take_references(self) -> None:
        """One after the other, each twice: what is not the same in calm proves nothing in a storm."""
        for number in range(len(self.bodies)):
            first, second = [await self.ask(0, number, is_retry=False) for _ in range(2)]
            for answer in (first, second):
                if answer.failure is not None:
                    raise RuntimeError(f"prompt {number} has no reference: {answer.failure} {answer.detail}")
            if first.text != second.text or not first.text:
                raise RuntimeError(f"prompt {number} is answered in two ways, though greedy and in calm")
            self.references.append(first.text)

    async def run(self, num_clients: int, until: Callable[[], bool], seed: int) -> None:
        """All clients, each with one request at a time, until the time is up."""
        async with asyncio.TaskGroup() as tasks:
            for client in range(num_clients):
                tasks.create_task(self._run_one(client, until, random.Random(f"{seed} {client}")))

    async def _run_one(self, client: int, until: Callable[[], bool], rng: random.Random) -> None:
        while not until():
            number = rng.randrange(len(self.bodies))
            request = await self.ask(client, number, is_retry=False)
            self.requests.append(request)
            if request.was_cut:
                self.requests.append(await self.ask(client, number, is_retry=True))
            elif request.failure is not None:
                await asyncio.sleep(PAUSE_SECONDS)

    async def ask(self, client: int, number: int, *, is_retry: bool) -> StormRequest:
        """One attempt on a connection of its own; it never raises for what the other side does."""
        connection = Connection(self._host, self._port, keeps_events=True)
        sent, answer, failure, detail = self.now(), None, None, ""
        patience = self.patience_seconds
        try:
            async with asyncio.timeout(patience):
                answer = await connection.post(PATH, self._body(number))
        except TimeoutError:
            failure, detail = Failure.HANG, f"no end after {patience:g} s"
        except StreamCut as cut:
            answer, failure, detail = cut.answer, Failure.RESET, "in mid-stream"
        except (OSError, EOFError) as error:
            failure, detail = Failure.RESET, f"before the answer: {type(error).__name__}"
        finally:
            connection.abort()
        text, complaint = read_events(answer.events) if answer is not None else ("", "")
        if (
            failure is None
            and answer is not None
            and (complaint or not answer.is_whole or answer.status != 200)
        ):
            failure, detail = Failure.REFUSED, f"status {answer.status} {complaint}".strip()
        ttft = answer.ttft if answer is not None and text else None
        headers = {} if answer is None else answer.headers
        if "x-kvasir-replica" in headers:
            detail = f"{detail} ({headers['x-kvasir-replica']})".strip()
        is_split = "x-kvasir-computed-at" in headers
        return StormRequest(client, number, sent, self.now(), text, ttft, failure, detail, is_retry, is_split)

    def _body(self, number: int) -> bytes:
        """Return the prompt's request, with a salt of its own if it is to find nothing cached."""
        body = self.bodies[number]
        if not self._finds_nothing:
            return body
        return body.removesuffix(b"}") + b', "cache_salt": "%s"}' % uuid.uuid4().hex.encode()


def read_events(events: Sequence[bytes]) -> tuple[str, str]:
    """Return the text of a stream, and the message of the error in it."""
    text: list[str] = []
    complaint = ""
    for data in events:
        if data == b"[DONE]":
            continue
        content = json.loads(data)
        if "error" in content:
            complaint = str(content["error"].get("message", content["error"]))
        text += [choice["delta"].get("content") or "" for choice in content.get("choices", ())]
    return "".join(text), complaint


def bodies_of(
    model: str, num_prompts: int, num_tokens: int, seed: int, num_more_words: int = 0
) -> list[bytes]:
    """Chats of a few groups, in each of which all begin alike."""
    rng = random.Random(seed)
    groups = [_words(rng, 200) for _ in range(max(1, num_prompts // 6))]
    return [
        json.dumps(
            {
                "model": model,
                "stream": True,
                "temperature": 0,
                "ignore_eos": True,
                "max_tokens": num_tokens,
                "messages": [
                    {"role": "system", "content": groups[number % len(groups)]},
                    {
                        "role": "user",
                        "content": f"{_words(rng, num_more_words + rng.randrange(10, 120))} number {number}",
                    },
                ],
            }
        ).encode()
        for number in range(num_prompts)
    ]


def _words(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(SAMPLE_WORDS) for _ in range(num_words))
