"""decide(): how many replicas a pool should have, by its recent load.

Samples come with their times, all from after the last change of the pool's size. Each sample asks for its
load divided by the target per replica, rounded up. The pool grows to the minimum over `up_seconds` and
shrinks to the maximum over `down_seconds`. Shorter peaks and pauses change nothing, nor do samples that do
not reach back that far.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config import AutoscaleSpec


@dataclass(frozen=True, slots=True)
class LoadSample:
    """A pool's total load at one moment."""

    at: float
    num_in_flight: int
    num_pending_tokens: int


def decide(spec: AutoscaleSpec, num_replicas: int, samples: Sequence[LoadSample], now: float) -> int:
    """Return the new number of replicas; `samples` are in order of time."""
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
    """Return the replicas that one sample asks for; within `tolerance` the size stays."""
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
    """Keep the samples that later decisions need: those in the windows, and one before."""
    horizon = now - max(spec.up_seconds, spec.down_seconds)
    return list(samples[max(0, sum(sample.at <= horizon for sample in samples) - 1) :])


def _window(samples: Sequence[LoadSample], now: float, seconds: float) -> list[LoadSample]:
    """Return the samples of the last `seconds`; none if they do not cover that time."""
    if not samples or samples[0].at > now - seconds:
        return []
    return [sample for sample in samples if sample.at >= now - seconds] or [samples[-1]]


def _bounded(spec: AutoscaleSpec, count: int) -> int:
    return min(spec.max_replicas, max(spec.min_replicas, count))
