"""Shapes of a load: the rate of arrivals as a function of time, and arrivals bent to follow it. Pure.

Owns the named shapes. A rate is relative: 1 is the workload's own.
"""

import bisect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from loadtests.workloads import Workload

DAY_PIECES = 96


@dataclass(frozen=True, slots=True)
class Shape:
    """Linear between its knots (seconds, rate), from time 0 to the last. Two knots at one time are a jump."""

    knots: tuple[tuple[float, float], ...]

    @property
    def duration_seconds(self) -> float:
        return self.knots[-1][0]

    @property
    def amount(self) -> float:
        """Seconds of the workload's own time that fit in."""
        return self._amounts()[-1]

    def rate_at(self, seconds: float) -> float:
        """At a jump, the rate after it; after the end, the last one."""
        position = bisect.bisect_right([knot[0] for knot in self.knots], seconds)
        if position == len(self.knots):
            return self.knots[-1][1]
        (start, first), (end, last) = self.knots[position - 1], self.knots[position]
        return first + (last - first) * (seconds - start) / (end - start)

    def time_of(self, amount: float) -> float:
        """Return the time when `amount` seconds of the workload's own time have passed; at most the shape's
        end."""
        amounts = self._amounts()
        position = bisect.bisect_left(amounts, amount, lo=1)
        if position == len(amounts):
            return self.duration_seconds
        (start, first), (end, last) = self.knots[position - 1], self.knots[position]
        left = amount - amounts[position - 1]
        # The area under a line that starts at `first`: first * t + slope / 2 * t² = left.
        slope = (last - first) / (end - start)
        root = math.sqrt(max(0.0, first * first + 2 * slope * left))
        # At a rate near zero a rounding of `left` is a long time, and could pass the end.
        return min(end, start + (2 * left / (first + root) if left else 0.0))

    def _amounts(self) -> list[float]:
        areas = (
            (end - start) * (first + last) / 2
            for (start, first), (end, last) in itertools.pairwise(self.knots)
        )
        return list(itertools.accumulate(areas, initial=0.0))


def constant(duration: float, _low: float, _high: float, _period: float) -> Shape:
    """Return the same rate all the time."""
    return Shape(((0.0, 1.0), (duration, 1.0)))


def ramp(duration: float, low: float, high: float, _period: float) -> Shape:
    """From low to high."""
    return Shape(((0.0, low), (duration, high)))


def steps(duration: float, low: float, high: float, period: float) -> Shape:
    """From low to high in steps of a period each."""
    number = max(1, math.ceil(duration / period - 1e-9))
    knots: list[tuple[float, float]] = []
    for step in range(number):
        rate = low if number == 1 else low + (high - low) * step / (number - 1)
        knots += [(step * period, rate), (min(duration, (step + 1) * period), rate)]
    return Shape(tuple(knots))


def burst(duration: float, low: float, high: float, period: float) -> Shape:
    """Low, and high in the last quarter of every period."""
    knots: list[tuple[float, float]] = []
    start = 0.0
    while start < duration - 1e-9:
        for begin, end, rate in ((0.0, 0.75, low), (0.75, 1.0, high)):
            first, last = start + begin * period, min(duration, start + end * period)
            if first < last:
                knots += [(first, rate), (last, rate)]
        start += period
    return Shape(tuple(knots))


def day(duration: float, low: float, high: float, period: float) -> Shape:
    """Low at night, high at noon, along a sine; a day is one period."""
    number = max(1, math.ceil(DAY_PIECES * duration / period))
    times = [duration * piece / number for piece in range(number + 1)]
    return Shape(
        tuple((at, low + (high - low) * (1 - math.cos(2 * math.pi * at / period)) / 2) for at in times)
    )


@dataclass(frozen=True, slots=True)
class NamedShape:
    """A shape and what it takes unless told otherwise; `period` is a share of the duration."""

    make: Callable[[float, float, float, float], Shape]
    low: float
    high: float
    period: float


SHAPES = {
    "constant": NamedShape(constant, 1.0, 1.0, 1.0),
    "ramp": NamedShape(ramp, 0.2, 1.8, 1.0),
    "steps": NamedShape(steps, 0.5, 2.0, 0.25),
    "burst": NamedShape(burst, 0.5, 4.0, 1 / 3),
    "day": NamedShape(day, 0.2, 1.8, 1.0),
    "replica-kill": NamedShape(constant, 1.0, 1.0, 1.0),
}
"""By name. With replica-kill, the rate stays and something else happens half-way."""


def make_shape(
    name: str,
    duration_seconds: float,
    *,
    low: float | None = None,
    high: float | None = None,
    period_seconds: float | None = None,
) -> Shape:
    """Raises ValueError."""
    named = SHAPES[name]
    low = named.low if low is None else low
    high = named.high if high is None else high
    period = named.period * duration_seconds if period_seconds is None else period_seconds
    if duration_seconds <= 0 or period <= 0:
        raise ValueError("a shape lasts longer than 0 s, and so does its period")
    if low < 0 or high < 0 or low + high == 0:
        raise ValueError("the rates of a shape are 0 or above, and not both 0")
    return named.make(duration_seconds, low, high, period)


def bend(workload: Workload, shape: Shape) -> Workload:
    """Return the same requests in the same order, as dense as the shape says; those after its end are left
    out."""
    amount = shape.amount
    return replace(
        workload,
        requests=tuple(
            replace(request, arrival_seconds=shape.time_of(request.arrival_seconds))
            for request in workload.requests
            if request.arrival_seconds < amount
        ),
    )
