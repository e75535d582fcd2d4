"""Streamed answers about images whose vLLM replica is killed: another one takes them over.

Answers are greedy, since only such ones continue on vLLM with the tokens that would have come, and pay a
penalty for words that come again: the model, which answers noise, would else repeat one word, and a token
more or less would not be seen.
"""

import contextlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtests.stacks.local_stack import LocalStack, local_stack
from replicas.media.probes import probe_png
from tests.integration.observe import MODEL, is_idle, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.cluster]

RED, BLUE = (probe_png(300, 200, colour) for colour in (b"\xff\0\0", b"\0\0\xff"))
NUM_TOKENS, NUM_BEFORE = 400, 20
"""Of an answer, and how many events of it come before the accident."""


@dataclass(frozen=True)
class Answer:
    text: str
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: str


@pytest.fixture(scope="module")
def stack(image_model: Path) -> Iterator[LocalStack]:
    settings: dict[str, Any] = {
        "engine": "vllm",
        "model": image_model,
        "model_name": MODEL,
        "dtype": "float32",  # what is computed again in other pieces is rounded otherwise, but not by much
        "context_length": 1024,
        "num_blocks": 128,
        "max_batched_tokens": 256,
        "max_running": 16,
    }
    with local_stack(num_replicas=2, replica_settings=settings) as running:
        yield running
        wait_until(lambda: is_idle(running), "everything given back")


def samples(stack: LocalStack) -> dict[str, float]:
    """The router's, by name and the values of labels: `router_images_total sent`."""
    families = text_string_to_metric_families(httpx.get(stack.url + "/metrics", timeout=60).text)
    return {
        " ".join([each.name, *each.labels.values()]): each.value
        for family in families
        for each in family.samples
    }


class Watch:
    """What the router has counted since."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self._before = samples(stack)

    def counted(self, *names: str) -> tuple[float, ...]:
        now = samples(self._stack)
        return tuple(now[name] - self._before[name] for name in names)

    def images(self) -> tuple[float, ...]:
        """How many were sent, known and failed."""
        return self.counted(*(f"router_images_total {way}" for way in ("sent", "known", "failed")))

    def moves(self) -> tuple[float, ...]:
        """How many attempts were repeated before the first token, and how many answers went on elsewhere."""
        return self.counted("router_retries_total", "router_resumes_total")


def stream(
    stack: LocalStack,
    words: str,
    *contents: bytes,
    accident: Callable[[str], object] | None = None,
) -> tuple[str, Answer]:
    """Who answered, and what; the accident happens to that replica after some events."""
    urls = ["data:image/png;base64," + b64encode(content).decode() for content in contents]
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    with openai.OpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": [{"type": "text", "text": words}, *parts]}],
            max_tokens=NUM_TOKENS,
            temperature=0,
            frequency_penalty=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        replica = raw.headers["x-kvasir-replica"]
        chunks = []
        for chunk in raw.parse():
            chunks.append(chunk)
            if len(chunks) == NUM_BEFORE and accident is not None:
                accident(replica)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage is not None]
    (reason,) = [choice.finish_reason for choice in choices if choice.finish_reason is not None]
    text = "".join(choice.delta.content or "" for choice in choices)
    return replica, Answer(text, usage.prompt_tokens, usage.completion_tokens, reason)


def kill(stack: LocalStack, replica: str) -> None:
    """Its engine process, too."""
    children = psutil.Process(stack.pid(replica)).children(recursive=True)
    stack.kill(replica)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def test_an_answer_goes_on_where_its_image_was_not(stack: LocalStack) -> None:
    words = "Look at the picture. " * 12
    first, whole = stream(stack, words, RED)
    assert (whole.num_tokens, whole.finish_reason) == (NUM_TOKENS, "length")
    assert stream(stack, words, BLUE)[1].text != whole.text, "an image that got lost would be seen"
    watch = Watch(stack)
    victim, answer = stream(stack, words, RED, accident=lambda replica: kill(stack, replica))
    assert victim == first
    assert watch.moves() == (0, 1), "the answer had ended before its replica was killed"
    assert answer == whole
    assert watch.images() == (1, 1, 0)
    (survivor,) = {"replica-0", "replica-1"} - {victim}
    assert stream(stack, words, RED) == (survivor, whole)
    assert watch.images() == (1, 2, 0)
