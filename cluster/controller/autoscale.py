"""decide(): how many replicas a pool should have, given the load of the last while.

Owns the arithmetic. Samples come with their times, and all are from after the pool's size last changed.

Each sample asks for a number of replicas: its load divided by the target per replica, rounded up. The
pool grows to the least that any sample of the last `up_seconds` asked for, and shrinks to the most of the
last `down_seconds`: a peak or a pause shorter than that changes nothing, and neither does anything
until samples reach back so far.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config import AutoscaleSpec


@dataclass(frozen=True, slots=True)
class LoadSample:
    """What all replicas of a pool together had to do at one moment."""

    at: float
    num_in_flight: int
    num_pending_tokens: int


def decide(spec: AutoscaleSpec, num_replicas: int, samples: Sequence[LoadSample], now: float) -> int:
    """The number of replicas from now on; `samples` by time."""
    bounded = _bounded(spec, num_replicas)
    if bounded != num_replicas:
        return bounded
    up = [asked(spec, num_replicas, sample) for sample in _window(samples, now, spec.up_seconds)]
    if up and min(up) > num_replicas:
        return min(up)
    down = [asked(spec, num_replicas, sample) for sample in _window(samples, now, spec.down_seconds)]
    if down and max(down) < num_replicas:
        return max(down)
    return num_replicas


def asked(spec: AutoscaleSpec, num_replicas: int, sample: LoadSample) -> int:
    """What one sample asks for. A pool that is right within `tolerance` is right."""
    loads = []
    if spec.target_in_flight is not None:
        loads.append(sample.num_in_flight / spec.target_in_flight)
    if spec.target_pending_tokens is not None:
        loads.append(sample.num_pending_tokens / spec.target_pending_tokens)
    load = max(loads)
    wanted = math.ceil(load)
    if wanted > num_replicas and load <= num_replicas * (1 + spec.tolerance):
        wanted = num_replicas
    if wanted < num_replicas and load > (num_replicas - 1) * (1 - spec.tolerance):
        wanted = num_replicas
    return _bounded(spec, wanted)


def kept(spec: AutoscaleSpec, samples: Sequence[LoadSample], now: float) -> list[LoadSample]:
    """The samples that a later decision may still need: those of the windows, and one before them."""
    horizon = now - max(spec.up_seconds, spec.down_seconds)
    return list(samples[max(0, sum(sample.at <= horizon for sample in samples) - 1) :])


def _window(samples: Sequence[LoadSample], now: float, seconds: float) -> list[LoadSample]:
    """Those of the last `seconds`, if there are samples from all of that time."""
    if not samples or samples[0].at > now - seconds:
        return []
    return [sample for sample in samples if sample.at >= now - seconds] or [samples[-1]]


def _bounded(spec: AutoscaleSpec, count: int) -> int:
    return min(spec.max_replicas, max(spec.min_replicas, count))
