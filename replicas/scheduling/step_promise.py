"""StepPromise: how many prompt tokens a step may compute so that the requests that decode in it keep a time.

Owns the promised seconds and the fitted cost of steps. Pure: its caller names the work of each step and
its seconds.

    seconds = base + per prompt token + per prompt token and token of KV before it
              + per token of KV that decoding requests attend to + per step in which a prompt ends

The coefficients come from the last steps, by least squares of relative errors, none below 0. Steps without
prompts and those with are forgotten apart, so that a long answer does not make it forget what prompts cost.

A step costs at least what reading the weights costs, behind which a few prompt tokens are free; where the
last steps had only so few, the fit sees no cost of a token. So a step gets at most a quarter more than the
largest one that had both.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

LEAST_TOKENS = 128
"""Prompt tokens of every step, whatever they take: a promise that cannot be kept stops no prompt."""
EXCESS_SHARE = 8.0
"""And as many as take this multiple of the time by which decoding alone exceeds the promise. Where long
contexts make it do so, prompts that got the least only would wait for ever more requests that decode
slowly."""
WAIT_SECONDS = 0.5
"""Prompts that wait get the share of the time by which they are computed within this time, whatever is
promised: first tokens count as well, and in an overload a kept promise would halve what is served in time."""
MOST_TIMES_DECODING = 3.0
"""But at most this multiple of the time that decoding takes: one long prompt is no overload."""
FIRST_TOKENS = 256
"""Prompt tokens until steps have shown their cost, and where no step has had prompts next to decoding
requests."""
MULTIPLE = 32
"""A step's prompt tokens are a multiple, as GPUs compute tiles."""

_GROWTH = 1.25
_REACH_DECAY = 0.97
_DECAY = 0.95
"""Per step of the same kind: about the last twenty count."""
_LEAST_STEPS = 3
"""With prompts, before the fit is believed."""
_OUTLIER = 2.0
"""Bound on a step's time over the expected one, and on its inverse; one further off counts as this."""
_SHORTEST_SECONDS, _LONGEST_SECONDS = 1e-6, 60.0
"""No step takes less or more."""
_RIDGE = 1e-6
_SCALES = (1.0, 1e-3, 1e-7, 1e-5, 1.0)
"""Makes the features of usual steps about 1."""


class StepChunk(Protocol):
    """A request's share of a step, in an engine or in a simulation."""

    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def samples(self) -> bool: ...
    @property
    def is_decode(self) -> bool: ...


class StepWork(NamedTuple):
    """`num_attended_tokens` counts for each prompt token the KV before its chunk, and `num_context_tokens`
    the KV of requests that decode."""

    num_prompt_tokens: int
    num_attended_tokens: int = 0
    num_context_tokens: int = 0
    ends_prompt: bool = False


def work_of(chunks: Sequence[StepChunk]) -> StepWork:
    num_prompt_tokens = num_attended_tokens = num_context_tokens = 0
    ends_prompt = False
    for chunk in chunks:
        if chunk.is_decode:
            num_context_tokens += chunk.start + 1
        else:
            num_prompt_tokens += chunk.num_tokens
            num_attended_tokens += chunk.num_tokens * chunk.start
            ends_prompt = ends_prompt or chunk.samples
    return StepWork(num_prompt_tokens, num_attended_tokens, num_context_tokens, ends_prompt)


class StepPromise:
    """`seconds` is the longest that a step with decoding requests should take."""

    def __init__(self, seconds: float, least_tokens: int = LEAST_TOKENS) -> None:
        assert 0 < seconds < math.inf
        self.seconds = seconds
        self._least_tokens = max(1, least_tokens)
        self._fit = StepFit()
        self._reach = 0.0
        """The most prompt tokens of a step with decoding requests, less the longer ago that was."""

    def num_prompt_tokens(self, num_context_tokens: int, start: int, num_pending_tokens: int = 0) -> int:
        """Return the most that the next step may compute. `start` is how much of the prompt whose turn it is
        has been computed, and `num_pending_tokens` are those of all prompts that are still to be."""
        wanted = self._wanted(num_context_tokens, start, num_pending_tokens)
        bound = max(FIRST_TOKENS, self._reach * _GROWTH)
        return max(self._least_tokens, int(min(wanted, bound)) // MULTIPLE * MULTIPLE)

    def _wanted(self, num_context_tokens: int, start: int, num_pending_tokens: int) -> float:
        cost = self._fit.cost()
        if cost is None:
            return FIRST_TOKENS
        decoding = cost.base + cost.context_token * num_context_tokens
        token = cost.prompt_token + cost.attended_token * start
        if token <= 0:
            return math.inf
        left = max(self.seconds - decoding, EXCESS_SHARE * (decoding - self.seconds))
        share = num_pending_tokens * token / WAIT_SECONDS
        times = share / (1.0 - share) if share < 1.0 else math.inf
        return max(left, min(times, MOST_TIMES_DECODING) * decoding) / token

    def observe(self, work: StepWork, seconds: float) -> None:
        """Record what a step computed and the seconds that it took."""
        if not _SHORTEST_SECONDS <= seconds <= _LONGEST_SECONDS:
            return
        self._fit.observe(work, seconds)
        if work.num_prompt_tokens and work.num_context_tokens:
            self._reach = max(work.num_prompt_tokens, self._reach * _REACH_DECAY)


def open_promise(seconds: float | None, alignment: int = 1) -> StepPromise | None:
    """Return the setting's promise, if it is one. A step gets `alignment` tokens, too: fewer may be no chunk
    of a model that keeps states."""
    return None if seconds is None else StepPromise(seconds, max(LEAST_TOKENS, alignment))


class StepCost(NamedTuple):
    """Seconds, in the order of the module's formula."""

    base: float
    prompt_token: float
    attended_token: float
    context_token: float
    prompt_end: float

    def seconds(self, work: StepWork) -> float:
        return sum(map(float.__mul__, self, map(float, _features(work))))


def _features(work: StepWork) -> tuple[float, ...]:
    return (1, work.num_prompt_tokens, work.num_attended_tokens, work.num_context_tokens, work.ends_prompt)


class _Sums:
    """Normal equations over scaled features, of which older ones count less."""

    def __init__(self) -> None:
        size = len(_SCALES)
        self.matrix = [[0.0] * size for _ in range(size)]
        self.vector = [0.0] * size
        self.num_steps = 0

    def add(self, row: Sequence[float], seconds: float) -> None:
        """Features and time of a step, both over the time that was expected."""
        self.num_steps += 1
        for i, each in enumerate(row):
            line = self.matrix[i]
            for j, other in enumerate(row):
                line[j] = line[j] * _DECAY + each * other
            self.vector[i] = self.vector[i] * _DECAY + each * seconds


class StepFit:
    """The cost of steps, from those that it has observed."""

    def __init__(self) -> None:
        self._with_prompts = _Sums()
        self._without = _Sums()
        self._cost: StepCost | None = None

    def observe(self, work: StepWork, seconds: float) -> None:
        cost, expected = self.cost(), seconds
        if cost is not None:
            expected = min(max(cost.seconds(work), _SHORTEST_SECONDS), _LONGEST_SECONDS)
            seconds = min(max(seconds, expected / _OUTLIER), expected * _OUTLIER)
        row = [scale * each / expected for scale, each in zip(_SCALES, _features(work), strict=True)]
        (self._with_prompts if work.num_prompt_tokens else self._without).add(row, seconds / expected)
        self._cost = None

    def cost(self) -> StepCost | None:
        """None until a few steps with prompts have shown it."""
        if self._with_prompts.num_steps < _LEAST_STEPS:
            return None
        if self._cost is None:
            self._cost = self._solved()
        return self._cost

    def _solved(self) -> StepCost:
        one, other = self._with_prompts, self._without
        matrix = [
            [x + y for x, y in zip(a, b, strict=True)] for a, b in zip(one.matrix, other.matrix, strict=True)
        ]
        vector = [x + y for x, y in zip(one.vector, other.vector, strict=True)]
        kept = list(range(len(_SCALES)))
        while True:
            found = _solve(matrix, vector, kept)
            lowest = min(found, key=found.__getitem__)
            if found[lowest] >= 0:
                return StepCost(*(found.get(i, 0.0) * scale for i, scale in enumerate(_SCALES)))
            kept.remove(lowest)


def _solve(
    matrix: Sequence[Sequence[float]], vector: Sequence[float], kept: Sequence[int]
) -> dict[int, float]:
    """Solve the equations of the kept features by elimination. What no step showed is 0."""
    rows = [[matrix[i][j] for j in kept] + [vector[i]] for i in kept]
    largest = max(row[i] for i, row in enumerate(rows))
    for i, row in enumerate(rows):
        row[i] += _RIDGE * (row[i] or largest)
    for i, row in enumerate(rows):
        for below in rows[i + 1 :]:
            factor = below[i] / row[i]
            for j in range(i, len(row)):
                below[j] -= factor * row[j]
    found: list[float] = [0.0] * len(kept)
    for i in reversed(range(len(kept))):
        rest = rows[i][-1] - sum(rows[i][j] * found[j] for j in range(i + 1, len(kept)))
        found[i] = rest / rows[i][i]
    return dict(zip(kept, found, strict=True))
