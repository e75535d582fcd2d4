"""Running a TorchEngine to the end of its requests, and keeping the logits that it computed."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from replicas.config import ReplicaConfig
from replicas.engine import expand
from replicas.protocol.blocks import BlockHash, pack_token_ids
from replicas.protocol.frames import (
    PromptUsage,
    RequestKey,
    SamplingParams,
    Submit,
    TokenDelta,
    TokenLogprobs,
)
from replicas.scheduling.request import Chunk
from replicas.torch_engine.engine import TorchEngine

ROOT = BlockHash(bytes(16))
DEVICE = torch.device(os.environ.get("KVASIR_TEST_DEVICE", "cpu"))
"""`cuda` runs the tests of this engine on a GPU."""


@dataclass
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    usage: PromptUsage | None = None
    finish: str | None = None


class Driver:
    """An engine whose logits are recorded. Settings are those of ReplicaConfig."""

    def __init__(self, model: Path, **settings: Any) -> None:
        sizes = {"block_size": 8, "num_blocks": 256, "context_length": 400}
        way = {"device": str(DEVICE), "dtype": "float32", "attention": "gather"}
        settings = {**sizes, **way, **settings}
        self.engine = TorchEngine(ReplicaConfig(model=str(model), **settings))
        self.outcomes: dict[RequestKey, Outcome] = {}
        self.num_computed_tokens = 0
        self.largest_batch = 0
        self.num_restarts = 0
        self._run = self.engine.runner.run
        self.engine.runner.run = self._recording_run  # type: ignore[method-assign]
        self._next_id = 0

    def always_load(self) -> None:
        """However fast this model computes."""
        lower_tiers = self.engine._scheduler._lower_tiers
        assert lower_tiers is not None
        lower_tiers._token_seconds_now = lambda: 1.0

    def _recording_run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        logits = self._run(chunks)
        self.num_computed_tokens += sum(chunk.num_tokens for chunk in chunks)
        self.largest_batch = max(self.largest_batch, len(chunks))
        self.num_restarts = max([self.num_restarts, *(chunk.request.num_preemptions for chunk in chunks)])
        for chunk, row in zip([chunk for chunk in chunks if chunk.samples], logits, strict=True):
            self.outcomes[chunk.request.key].logits.append(row.to("cpu", copy=True))
        return logits

    def add(self, prompt: Sequence[int], sampling: SamplingParams, **fields: Any) -> RequestKey:
        """`fields` are those of the submit."""
        self._next_id += 1
        submit = Submit(0, pack_token_ids(prompt), sampling, ROOT, **fields)
        (request,) = expand(submit, self._next_id)
        self.engine.add(request)
        self.outcomes[request.key] = Outcome()
        return request.key

    def step(self) -> None:
        for delta in self.engine.step().deltas:
            self._record(delta)

    def finish(self) -> Mapping[RequestKey, Outcome]:
        while self.engine.has_work():
            self.step()
        return self.outcomes

    def generate(self, prompt: Sequence[int], num_tokens: int, **sampling: Any) -> Outcome:
        """Greedy and past EOS unless `sampling` says otherwise."""
        key = self.add(prompt, greedy(num_tokens, **sampling))
        return self.finish()[key]

    def _record(self, delta: TokenDelta) -> None:
        outcome = self.outcomes[delta.key]
        outcome.token_ids.extend(delta.token_ids)
        outcome.logprobs.extend(delta.logprobs or ())
        outcome.usage = outcome.usage or delta.usage
        outcome.finish = delta.finish_reason


def greedy(num_tokens: int, **sampling: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, **sampling})
