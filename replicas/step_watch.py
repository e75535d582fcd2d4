"""StepWatch: whether a busy engine still ends its steps.

Owns how long it has been silent, and how long it may be. The caller supplies the time, and whether there is
work.

A hanging engine (its process stopped, a GPU that does not answer, a deadlock) raises nothing; only passing
time reveals it. Time counts only between looks: a machine that sleeps, or has no processor to spare, has not
waited for its engine.
"""

from dataclasses import dataclass

PATIENCE = 5.0
"""How many times the longest step that can be expected is no hang yet: prompts cost more the longer they are,
and a machine may be shared."""

UNMEASURED_PATIENCE = 2.0
"""Factor until a prompt has been measured. The start-up proof overestimates the speed: its prompts are small,
and the first ones."""

MAX_UNMEASURED_FLOORS = 20.0
"""And it is believed no further than this."""

STEP_MEMORY = 0.999
"""Decay of the longest step with each further step."""

MAX_LOOK_INTERVALS = 2.0
"""A look that comes later than this counts as if it had not."""


@dataclass(slots=True)
class StepWatch:
    """Not hung for at least `floor_seconds`, nor for a few times the longest step that can be expected.

    That is the longest of late, or one of `max_step_tokens` at the speed that was measured: at first in the
    start-up proof (`seconds_per_token`), then by the engine's own loop.
    """

    floor_seconds: float
    look_seconds: float
    max_step_tokens: int
    seconds_per_token: float
    silent_seconds: float = 0.0
    _longest_step: float = 0.0
    _is_measured: bool = False
    _has_stepped: bool = False
    _owes_step: bool = False
    _looked_at: float | None = None

    @property
    def limit_seconds(self) -> float:
        """How long it may be silent."""
        whole_step = self.seconds_per_token * self.max_step_tokens
        if self._is_measured:
            for_prompts = PATIENCE * whole_step
        else:
            for_prompts = min(UNMEASURED_PATIENCE * whole_step, MAX_UNMEASURED_FLOORS * self.floor_seconds)
        return max(self.floor_seconds, for_prompts, PATIENCE * self._longest_step)

    @property
    def is_hung(self) -> bool:
        return self.silent_seconds > self.limit_seconds

    def step_ended(self, seconds: float, seconds_per_token: float) -> None:
        """A step took `seconds`; the speed of prompts is 0 while it is not known."""
        self._has_stepped = True
        self._longest_step = max(seconds, STEP_MEMORY * self._longest_step)
        if seconds_per_token > 0:
            self.seconds_per_token, self._is_measured = seconds_per_token, True

    def look(self, now: float, *, has_work: bool) -> bool:
        """Whether it hangs. Called every `look_seconds`, if the machine allows.

        Work that has been taken back meanwhile is a debt all the same: an engine that lives ends a step
        with every request and every abort.
        """
        if self._looked_at is not None and self._owes_step:
            self.silent_seconds += min(now - self._looked_at, MAX_LOOK_INTERVALS * self.look_seconds)
        self._looked_at = now
        if self._has_stepped:
            self.silent_seconds = 0.0
            self._owes_step = False
        self._has_stepped = False
        self._owes_step = self._owes_step or has_work
        return self.is_hung
