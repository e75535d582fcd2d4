"""Intake: how many sequences and tokens a replica has admitted, and whether it admits more.

Owns those counts. A request for sixteen continuations is sixteen sequences: each needs a place in the batch,
and room in the cache for its answer. `scheduling/admission.py` decides whether a request can ever run.
"""

from dataclasses import dataclass

from replicas.protocol.frames import Submit

COUNTED_OUTPUT_TOKENS = 1024
"""How many of a sequence's `max_tokens` count at most: few answers become longer, and many clients allow as
many as the context has room for. Routers count in the same way."""


@dataclass(slots=True)
class _HeldRequest:
    num_sequences: int
    num_prompt_tokens: int
    num_output_tokens: int
    """Per sequence."""


class Intake:
    """Admits anything while it is empty: a feasible request must not wait forever."""

    def __init__(self, *, max_sequences: int, max_tokens: int) -> None:
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._held: dict[int, _HeldRequest] = {}
        self._num_sequences = 0
        self._num_tokens = 0

    @property
    def num_sequences(self) -> int:
        return self._num_sequences

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def has_room(self, submit: Submit) -> bool:
        """Whether there is room for its sequences and tokens."""
        if not self._held:
            return True
        demand = _demand(submit)
        num_tokens = demand.num_prompt_tokens + demand.num_sequences * demand.num_output_tokens
        return (
            self._num_sequences + demand.num_sequences <= self._max_sequences
            and self._num_tokens + num_tokens <= self._max_tokens
        )

    def take(self, serial: int, submit: Submit) -> None:
        demand = self._held[serial] = _demand(submit)
        self._num_sequences += demand.num_sequences
        self._num_tokens += demand.num_prompt_tokens + demand.num_sequences * demand.num_output_tokens

    def end_sequence(self, serial: int) -> None:
        """One of the request's has ended; the prompt's tokens are held until the last one has."""
        held = self._held[serial]
        held.num_sequences -= 1
        self._num_sequences -= 1
        self._num_tokens -= held.num_output_tokens
        if held.num_sequences == 0:
            self._num_tokens -= held.num_prompt_tokens
            del self._held[serial]


def _demand(submit: Submit) -> _HeldRequest:
    num_output_tokens = min(submit.sampling.max_tokens, COUNTED_OUTPUT_TOKENS)
    return _HeldRequest(submit.num_choices, submit.num_tokens, num_output_tokens)
