"""Random prompts to a router before two sparse replicas, of which one is killed while it answers."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadtests.stacks.local_stack import LocalStack
from tests.integration.observe import metric
from tests.replicas.vllm_engine.foretold import Prompts

SETTLE_SECONDS = 0.3
"""Longer than the events of a step take from a replica to the router."""

LONGEST = 900
NUM_STREAMS = 3
NUM_STREAMED_TOKENS = 120
NUM_TOKENS_BEFORE = 20


@dataclass
class KilledRun:
    """`figures` counts prompts, wrong predictions, hit tokens and answers that went on elsewhere."""

    stack: LocalStack
    client: httpx.Client
    model: str
    block: int
    figures: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[int, int, int]] = field(default_factory=list)

    def go(self, num_prompts: int, num_kills: int) -> None:
        prompts = Prompts(11, self.block, LONGEST)
        every = num_prompts // (num_kills + 1)
        for number in range(1, num_prompts + 1):
            prompt, num_output = prompts.next(), prompts.num_output_tokens()
            answer = self.ask(prompt, num_output)
            foretold = int(answer.headers["x-kvasir-overlap-tokens"])
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            self.figures["prompts"] += 1
            self.figures["prompt tokens"] += len(prompt)
            self.figures["hit tokens"] += cached
            self.figures[answer.headers["x-kvasir-replica"]] += 1
            if foretold != cached:
                self.wrong.append((number, foretold, cached))
            prompts.ran(prompt, [])
            time.sleep(SETTLE_SECONDS)
            if number % every == 0 and number // every <= num_kills:
                self.kill_while_it_answers([prompts.next() for _ in range(NUM_STREAMS)])

    def ask(self, prompt: list[int], num_output: int) -> httpx.Response:
        answer = self.client.post("/v1/completions", json=self.body(prompt, num_output))
        answer.raise_for_status()
        return answer

    def body(self, prompt: list[int], num_output: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_output,
            "temperature": 0,
            "seed": 1,
            "ignore_eos": True,
        }

    def kill_while_it_answers(self, prompts: list[list[int]]) -> None:
        """The replica that answers the first prompt is killed, and starts again while prompts go on."""
        self.stack.wait_ready(2)
        with ThreadPoolExecutor() as threads:
            first = self.stream(prompts[0])
            victim = next(first)
            others = [threads.submit(lambda each=each: list(self.stream(each))) for each in prompts[1:]]
            said = [next(first) for _ in range(NUM_TOKENS_BEFORE)]
            self.stack.kill(victim)
            said += list(first)
            answers = ["".join(said), *("".join(other.result()[1:]) for other in others)]
        self.figures["streamed"] += len(prompts)
        self.figures["resumed"] = round(metric(self.stack, "router_resumes_total"))
        for prompt, answer in zip(prompts, answers, strict=True):
            direct = self.ask(prompt, NUM_STREAMED_TOKENS).json()["choices"][0]["text"]
            self.figures["other than asked again"] += answer != direct
        self.stack.start(victim)
        time.sleep(SETTLE_SECONDS)

    def stream(self, prompt: list[int]) -> Iterator[str]:
        """Yield the replica's name, then the text of each event."""
        body = {**self.body(prompt, NUM_STREAMED_TOKENS), "stream": True}
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            yield answer.headers["x-kvasir-replica"]
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    yield from (choice["text"] for choice in event["choices"])
