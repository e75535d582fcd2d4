"""Generated workloads: the set-ups that routers are commonly compared on, and those that they fail on.

Owns their shapes; the defaults are those of the published set-ups. All are seeded. Token ids are made of them
in `prompts.py`. Arrivals are open loop: a turn of a session comes at its time, answered or not.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence

from loadtests.workloads.workload import ImageSpan, Message, TraceRequest, Workload, by_arrival

Segment = tuple[str, int]
"""A piece of a prompt: a name that stands for its content, and its tokens."""

HEAD_TOKENS = 256
"""Length of beginning that routers with prefix hashing use."""


class PrefixIds:
    """Gives equal prefixes equal ids, whatever pieces they are made of."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._ids: dict[tuple[int, tuple[tuple[str, int, int], ...]], int] = {}
        self._chains: dict[tuple[Segment, ...], tuple[int, ...]] = {}

    def chain(self, segments: Sequence[Segment]) -> tuple[int, ...]:
        """Return the ids of a prompt's blocks; the last one may be partial."""
        key = tuple(segments)
        if key not in self._chains:
            self._chains[key] = self._make(key)
        return self._chains[key]

    def _make(self, segments: Sequence[Segment]) -> tuple[int, ...]:
        chain: list[int] = []
        parent, room = -1, self._block_tokens
        content: list[tuple[str, int, int]] = []
        for name, num_tokens in segments:
            start = 0
            while start < num_tokens:
                end = min(num_tokens, start + room)
                content.append((name, start, end))
                room -= end - start
                start = end
                if not room:
                    parent = self._ids.setdefault((parent, tuple(content)), len(self._ids))
                    chain.append(parent)
                    content, room = [], self._block_tokens
        if content:
            chain.append(self._ids.setdefault((parent, tuple(content)), len(self._ids)))
        return tuple(chain)


class Builder:
    """Collects the requests of one workload."""

    def __init__(self, name: str, block_tokens: int) -> None:
        self._name, self._block_tokens = name, block_tokens
        self._prefix_ids = PrefixIds(block_tokens)
        self._requests: list[TraceRequest] = []

    def add(
        self,
        arrival: float,
        segments: Sequence[Segment],
        num_output_tokens: int,
        *,
        user: str,
        session: str | None = None,
        key: str | None = None,
        tenant: str | None = None,
        messages: tuple[Message, ...] = (),
        images: tuple[ImageSpan, ...] = (),
    ) -> None:
        self._requests.append(
            TraceRequest(
                arrival_seconds=arrival,
                num_input_tokens=sum(num_tokens for _, num_tokens in segments),
                num_output_tokens=num_output_tokens,
                prefix_ids=self._prefix_ids.chain(segments),
                user=user,
                session=user if session is None else session,
                prompt_cache_key=key,
                tenant=tenant,
                messages=messages,
                images=images,
            )
        )

    def build(self) -> Workload:
        return Workload(self._name, self._block_tokens, by_arrival(self._requests))


def b2b(
    *,
    seed: int,
    qps: float = 30.0,
    num_requests: int = 6000,
    num_groups: int = 150,
    users_per_group: int = 5,
    prefix_tokens: int = 6000,
    question_tokens: int = 1200,
    output_tokens: int = 1000,
    block_tokens: int = 240,
) -> Workload:
    """Tenants with a long prefix each; a user of one asks its one question again and again (llm-d)."""
    rng = random.Random(seed)
    builder = Builder("b2b", block_tokens)
    for arrival in poisson(rng, qps, num_requests):
        group, user = rng.randrange(num_groups), rng.randrange(users_per_group)
        segments = [(f"prefix-{group}", prefix_tokens), (f"question-{group}-{user}", question_tokens)]
        builder.add(arrival, segments, output_tokens, user=f"user-{group}-{user}")
    return builder.build()


def zipf_b2b(
    *,
    seed: int,
    qps: float = 30.0,
    num_requests: int = 6000,
    num_groups: int = 150,
    users_per_group: int = 5,
    prefix_tokens: int = 6000,
    question_tokens: int = 1200,
    output_tokens: int = 1000,
    exponent: float = 1.0,
    block_tokens: int = 240,
) -> Workload:
    """Return the same tenants, some much larger than others, and no question twice."""
    rng = random.Random(seed)
    builder = Builder("zipf-b2b", block_tokens)
    draw = weighted(rng, [1 / (rank + 1) ** exponent for rank in range(num_groups)])
    for number, arrival in enumerate(poisson(rng, qps, num_requests)):
        group, user = draw(), rng.randrange(users_per_group)
        segments = [(f"prefix-{group}", prefix_tokens), (f"question-{number}", question_tokens)]
        builder.add(arrival, segments, output_tokens, user=f"user-{group}-{user}")
    return builder.build()


def shared_prefix(
    *,
    seed: int,
    qps: float = 10.0,
    num_groups: int = 64,
    prompts_per_group: int = 16,
    prefix_tokens: int = 2048,
    question_tokens: int = 128,
    output_tokens: int = 256,
    block_tokens: int = 128,
) -> Workload:
    """Every group's prompts once, shuffled (SGLang's generated-shared-prefix); each is a user of its own."""
    rng = random.Random(seed)
    builder = Builder("shared-prefix", block_tokens)
    prompts = list(itertools.product(range(num_groups), range(prompts_per_group)))
    rng.shuffle(prompts)
    for arrival, (group, number) in zip(poisson(rng, qps, len(prompts)), prompts, strict=True):
        segments = [(f"prefix-{group}", prefix_tokens), (f"question-{group}-{number}", question_tokens)]
        builder.add(arrival, segments, output_tokens, user=f"user-{group}-{number}")
    return builder.build()


def multi_turn(
    *,
    seed: int,
    qps: float = 0.5,
    num_sessions: int = 24,
    fewest_turns: int = 6,
    most_turns: int = 9,
    common_tokens: int = 500,
    mean_own_tokens: int = 1000,
    most_own_tokens: int = 5000,
    question_tokens: int = 140,
    answer_tokens: int = 100,
    think_seconds: float = 20.0,
    block_tokens: int = 16,
) -> Workload:
    """Conversations that begin at `qps`, each with a prefix of its own under one that all share (vLLM)."""
    rng = random.Random(seed)
    builder = Builder("multi-turn", block_tokens)
    for number, start in enumerate(poisson(rng, qps, num_sessions)):
        user, arrival = f"user-{number}", start
        num_own = min(most_own_tokens, lognormal(rng, mean_own_tokens))
        segments: list[Segment] = [("common", common_tokens), (f"own-{number}", num_own)]
        for turn in range(rng.randint(fewest_turns, most_turns)):
            segments.append((f"question-{number}-{turn}", around(rng, question_tokens)))
            num_answer = around(rng, answer_tokens)
            builder.add(arrival, segments, num_answer, user=user)
            segments.append((f"answer-{number}-{turn}", num_answer))
            arrival += rng.expovariate(1 / think_seconds)
    return builder.build()


def agentic(
    *,
    seed: int,
    qps: float = 0.5,
    num_sessions: int = 40,
    mean_turns: int = 20,
    shared_tokens: int = 9000,
    mean_context_tokens: int = 3000,
    mean_turn_tokens: int = 1500,
    mean_output_tokens: int = 425,
    tool_seconds: float = 15.0,
    most_tokens: int = 120_000,
    block_tokens: int = 128,
) -> Workload:
    """Coding agents: instructions and tools that all sessions share, then turns that only add to the prompt.

    As such an agent sends it, every session has a `prompt_cache_key` of its own. A session ends when its next
    prompt would exceed `most_tokens`.
    """
    rng = random.Random(seed)
    builder = Builder("agentic", block_tokens)
    for number, start in enumerate(poisson(rng, qps, num_sessions)):
        user, arrival = f"user-{number}", start
        segments: list[Segment] = [("tools", shared_tokens)]
        segments.append((f"context-{number}", lognormal(rng, mean_context_tokens)))
        num_turns = 1 + exponential(rng, mean_turns - 1)
        for turn in range(num_turns):
            segments.append((f"turn-{number}-{turn}", 1 + exponential(rng, mean_turn_tokens)))
            if sum(num_tokens for _, num_tokens in segments) > most_tokens:
                break
            num_output = 1 + exponential(rng, mean_output_tokens)
            builder.add(arrival, segments, num_output, user=user, key=f"session-{number}")
            segments.append((f"answer-{number}-{turn}", num_output))
            arrival += rng.expovariate(1 / tool_seconds)
    return builder.build()


def coding_agents(
    *,
    seed: int,
    qps: float = 0.08,
    num_sessions: int = 125,
    mean_turns: int = 40,
    tools_tokens: int = 15_000,
    mean_context_tokens: int = 35_000,
    mean_turn_tokens: int = 1200,
    mean_output_tokens: int = 400,
    tool_seconds: float = 8.0,
    most_tokens: int = 200_000,
    block_tokens: int = 128,
) -> Workload:
    """Long sessions of coding agents: about 40 turns, seconds apart, and prompts of 80,000 tokens on average.

    All sessions share instructions and tools, and each has files of its own. A turn appends what a tool
    returned, from a line to a whole file. A session ends when its next prompt would exceed `most_tokens`.
    """
    rng = random.Random(seed)
    builder = Builder("coding-agents", block_tokens)
    for number, start in enumerate(poisson(rng, qps, num_sessions)):
        user, arrival = f"user-{number}", start
        segments: list[Segment] = [("tools", tools_tokens)]
        segments.append((f"files-{number}", lognormal(rng, mean_context_tokens)))
        for turn in range(around(rng, mean_turns)):
            segments.append((f"result-{number}-{turn}", lognormal(rng, mean_turn_tokens, 1.2)))
            if sum(num_tokens for _, num_tokens in segments) > most_tokens:
                break
            num_output = lognormal(rng, mean_output_tokens, 1.2)
            builder.add(arrival, segments, num_output, user=user, key=f"session-{number}")
            segments.append((f"answer-{number}-{turn}", num_output))
            arrival += rng.expovariate(1 / tool_seconds)
    return builder.build()


def same_head(*, seed: int, qps: float = 10.0, num_requests: int = 1000, num_groups: int = 40) -> Workload:
    """Every prompt begins with the same 256 tokens; what tells the tenants apart comes after."""
    return _tenants("same-head", seed, qps, num_requests, [1.0] * num_groups, head_tokens=HEAD_TOKENS)


def one_large_tenant(
    *, seed: int, qps: float = 10.0, num_requests: int = 1000, num_groups: int = 40, share: float = 0.6
) -> Workload:
    """One tenant sends `share` of all requests."""
    weights = [share] + [(1 - share) / max(1, num_groups - 1)] * (num_groups - 1)
    return _tenants("one-large-tenant", seed, qps, num_requests, weights)


def one_key(*, seed: int, qps: float = 10.0, num_requests: int = 1000, num_groups: int = 40) -> Workload:
    """All tenants send one and the same `prompt_cache_key`."""
    return _tenants("one-key", seed, qps, num_requests, [1.0] * num_groups, key=lambda _number: "the key")


def key_per_request(
    *, seed: int, qps: float = 10.0, num_requests: int = 1000, num_groups: int = 40
) -> Workload:
    """No `prompt_cache_key` comes twice, although the prompts share much."""
    weights = [1.0] * num_groups
    return _tenants("key-per-request", seed, qps, num_requests, weights, key=lambda number: f"key-{number}")


def short_prompts(
    *, seed: int, qps: float = 10.0, num_requests: int = 1000, num_groups: int = 40
) -> Workload:
    """Prompts shorter than 256 tokens, of exactly 256 and of 257; a tenant's begin alike."""
    rng = random.Random(seed)
    builder = Builder("short-prompts", 16)
    for number, arrival in enumerate(poisson(rng, qps, num_requests)):
        group, length = rng.randrange(num_groups), rng.choice((1, 17, 100, 255, 256, 257))
        num_shared = min(length, 192)
        segments = [(f"prefix-{group}", num_shared), (f"question-{number}", length - num_shared)]
        builder.add(arrival, segments, 64, user=f"user-{group}-{rng.randrange(5)}")
    return builder.build()


def _tenants(
    name: str,
    seed: int,
    qps: float,
    num_requests: int,
    weights: Sequence[float],
    *,
    head_tokens: int = 0,
    key: Callable[[int], str] | None = None,
) -> Workload:
    """Tenants of five users each, with 2,048 tokens of a prefix and fresh questions of 256."""
    rng = random.Random(seed)
    builder = Builder(name, 64)
    draw = weighted(rng, weights)
    for number, arrival in enumerate(poisson(rng, qps, num_requests)):
        group = draw()
        segments = [("head", head_tokens), (f"prefix-{group}", 2048), (f"question-{number}", 256)]
        user = f"user-{group}-{rng.randrange(5)}"
        builder.add(arrival, segments, 128, user=user, key=None if key is None else key(number))
    return builder.build()


def poisson(rng: random.Random, qps: float, count: int) -> list[float]:
    if qps <= 0:
        raise ValueError(f"a rate is above 0, not {qps:g}")
    return list(itertools.accumulate(rng.expovariate(qps) for _ in range(count)))


def weighted(rng: random.Random, weights: Sequence[float]) -> Callable[[], int]:
    cumulative = list(itertools.accumulate(weights))
    return lambda: rng.choices(range(len(weights)), cum_weights=cumulative)[0]


def around(rng: random.Random, num_tokens: int) -> int:
    """Within a seventh of it."""
    return rng.randint(num_tokens - num_tokens // 7, num_tokens + num_tokens // 7)


def exponential(rng: random.Random, mean: float) -> int:
    return round(rng.expovariate(1 / mean)) if mean > 0 else 0


def lognormal(rng: random.Random, mean: float, sigma: float = 0.8) -> int:
    return max(1, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))
