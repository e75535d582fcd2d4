"""Why a sparse model's tokens were not read, by a router over vLLM's scheduler, against the slow rule."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from replicas.protocol.frames import PromptUsage
from replicas.protocol.status import ReplicaId
from tests.examples import examples
from tests.replicas.vllm_engine.router_view import ROOT, Prompts
from tests.router.explain.sparse_fleet import SparseFleet, expected_halves, said_halves

pytestmark = pytest.mark.vllm

NUM_PROMPTS = examples(400)
LONGEST = 980
REPLICAS = [ReplicaId("a"), ReplicaId("b")]
NAMES = (
    *("gpt-oss", "gpt-oss, a tail every 256 tokens", "gemma 3", "gemma 4", "two windows", "llama 4"),
    *("qwen3-next", "jamba", "states, a window and full attention", "gpt-oss, drafts", "qwen3-next, drafts"),
)


class Replica:
    """vLLM's scheduler, and all prefixes that were ever a point there, by its own blocks."""

    def __init__(self, name: str) -> None:
        from tests.replicas.vllm_engine.scheduler_run import SHAPES, SchedulerRun

        self.run = SchedulerRun(SHAPES[name])
        self.ever: set[bytes] = set()
        self._chains: list[Sequence[bytes]] = []
        self._held = self.run.held()

    def note_points(self, chain: Sequence[bytes]) -> None:
        """Note them on this request's chain, and on those of earlier ones that begin alike: what it keeps may
        be what they lacked."""
        before, self._held = self._held, self.run.held()
        rule = self._held
        if rule.copies == before.copies:
            return
        step = rule.alignment // rule.hash_block
        for each in (chain, *(other for other in self._chains if other[:1] == chain[:1])):
            for end in range(step, len(each) + 1, step):
                name = each[end - 1]
                is_held = any(copies[name] for copies in rule.copies)
                if is_held and name not in self.ever and rule.is_point(each[:end]):
                    self.ever.add(name)

    def ran(self, chain: Sequence[bytes]) -> None:
        self._chains.append(list(chain))

    def expected(self, chain: Sequence[bytes], num_tokens: int) -> tuple[int, int, list[tuple[str, int]]]:
        """The hit, how far full attention had the prompt, and what is to be said of the tokens between."""
        rule = self.run.held()
        limit = min(num_tokens - 1 + rule.peek, len(chain) * rule.hash_block)
        reach = rule.reach(chain[: limit // rule.hash_block])
        held = max(0, reach // rule.alignment * rule.alignment - rule.peek)
        step = rule.alignment // rule.hash_block
        ends = range(step, limit // rule.hash_block + 1, step)
        points = [end * rule.hash_block - rule.peek for end in ends if chain[end - 1] in self.ever]
        hit = rule.hit(chain, num_tokens)
        return hit, held, expected_halves(hit, held, points)


class Run:
    """One prompt at a replica, and what is to be said of it."""

    def __init__(
        self, replicas: dict[ReplicaId, Replica], fleet: SparseFleet, prompt: list[int], num_output: int
    ) -> None:
        self.replicas = replicas
        self.fleet = fleet
        self.prompt = prompt
        self.num_output = num_output
        self.output: list[int] = []
        self.hit = self.held = 0
        self.halves: list[tuple[str, int]] = []

    def __call__(self, replica_id: ReplicaId, explain: Callable[[PromptUsage], None]) -> None:
        replica = self.replicas[replica_id]
        run = replica.run
        request: Any = run.add(f"{id(self)}", self.prompt, self.num_output)
        self.hit, self.held, self.halves = replica.expected(request.block_hashes, len(self.prompt))
        while run.scheduler.has_requests():
            self.fleet.hear(replica_id, run.step())
            replica.note_points(request.block_hashes)
            for started in run.core.take_started():
                found = started.num_found_tokens
                assert found == self.hit
                num_unresumable = max(0, started.num_shared_tokens - found)
                explain(PromptUsage(len(self.prompt), found, 0, num_unresumable_tokens=num_unresumable))
        replica.ran(request.block_hashes)
        self.output = list(request.output_token_ids)


@pytest.mark.parametrize("name", NAMES)
def test_of_what_full_attention_had_it_is_said_whether_a_point_was_ever_kept(
    name: str, environment: None
) -> None:
    replicas = {each: Replica(name) for each in REPLICAS}
    card = replicas[REPLICAS[0]].run.card
    fleet = SparseFleet(card, ROOT, REPLICAS, 5)
    prompts = Prompts(3, card.block_size, LONGEST)
    halves: Counter[str] = Counter()
    for _ in range(NUM_PROMPTS):
        prompt = prompts.next()
        run = Run(replicas, fleet, prompt, prompts.num_output_tokens())
        misses = fleet.serve(prompt, run)
        assert misses.num_tokens == len(prompt) - run.hit
        assert said_halves(misses, run.held) == run.halves
        halves.update(cause for cause, _ in run.halves)
        prompts.ran(prompt, run.output)
    assert halves, "no prompt found more than it could resume"
