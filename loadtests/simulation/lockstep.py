"""Lockstep: the requests of one replica that decode, all of them one token further with each step.

Owns how far they are and what a number of such steps takes. Knows no prompts, no queue and no blocks.

One counter of steps says how far each request is. Two heaps, keyed by that counter, say when the next
one ends and when the next one needs a block or is past one; up to there the time of any number of steps is a
closed formula, so they need not be taken one by one.
"""

import math
from heapq import heappop, heappush

from loadtests.simulation.request import VirtualRequest
from replicas.simulated_engine.hardware import CostModel

_Note = tuple[int, int, int, VirtualRequest]
"""Step, rank, stint, request: something to look at when the count of steps gets there."""


class Lockstep:
    def __init__(self, cost: CostModel, block_size: int) -> None:
        self.num_requests = 0
        self.num_context_tokens = 0
        """Tokens that they attend to in the next step, the one that it computes included."""
        self._cost = cost
        self._block_size = block_size
        self._num_steps = 0
        self._ends: list[_Note] = []
        self._growths: list[_Note] = []

    def num_computed(self, request: VirtualRequest) -> int:
        """Tokens of a decoding request that have KV."""
        return self._num_steps + request.kv_offset

    def begin(self, request: VirtualRequest, read_until: float = math.inf) -> None:
        """Its newest token, `num_tokens` in all, has just been sampled and has no KV yet. All its blocks are
        read until it has `read_until` computed tokens."""
        request.is_decoding = True
        request.kv_offset = request.num_tokens - 1 - self._num_steps
        self.num_requests += 1
        self.num_context_tokens += request.num_tokens
        last = request.num_prompt_tokens + request.max_tokens - 1 - request.kv_offset
        heappush(self._ends, (last, request.rank, request.stint, request))
        self._note_growth(request, self._num_steps, read_until)

    def stop(self, request: VirtualRequest) -> None:
        """It has ended or was preempted; its `num_tokens` are right again."""
        request.is_decoding = False
        request.stint += 1
        request.num_tokens = self.num_computed(request) + 1
        self.num_requests -= 1
        self.num_context_tokens -= request.num_tokens

    def advance(self, num_steps: int) -> None:
        self._num_steps += num_steps
        self.num_context_tokens += self.num_requests * num_steps

    def seconds(self, num_steps: int, num_shared_tokens: int = 0) -> float:
        """Return the time of `num_steps` steps that only decode, each with one token more per request.

        `num_shared_tokens` need no reading, since they are read for another request.
        """
        num_more = self.num_requests * num_steps * (num_steps - 1) // 2
        num_read = num_steps * (self.num_context_tokens - num_shared_tokens) + num_more
        return num_steps * self._cost.d0 + self._cost.d1 * num_read

    def num_steps_to_next_note(self) -> int:
        """Until then no request ends, needs a block or is past one. (A void note only makes it shorter.)"""
        return min(notes[0][0] for notes in (self._ends, self._growths) if notes) - self._num_steps

    def take_ending(self) -> list[VirtualRequest]:
        """Return the requests that now have all their tokens."""
        return self._take(self._ends)

    def take_growing(self) -> list[VirtualRequest]:
        """Return the requests whose next token begins a block, or does not read one. Note those that get one
        again with `note_growth`."""
        return self._take(self._growths)

    def note_growth(self, request: VirtualRequest, read_until: float = math.inf) -> None:
        """It has a block for its next token; note when that one is full, or one is read no more."""
        self._note_growth(request, self._num_steps + 1, read_until)

    def _note_growth(self, request: VirtualRequest, first_step: int, read_until: float) -> None:
        step = first_step + -(first_step + request.kv_offset) % self._block_size
        if read_until < step + request.kv_offset:
            step = max(first_step, int(read_until) - request.kv_offset)
        heappush(self._growths, (step, request.rank, request.stint, request))

    def _take(self, notes: list[_Note]) -> list[VirtualRequest]:
        due: list[VirtualRequest] = []
        while notes and notes[0][0] <= self._num_steps:
            _, _, stint, request = heappop(notes)
            if request.is_decoding and request.stint == stint:
                due.append(request)
        return due
