"""Curve: how much of the prompts was cached, window by window, next to a cache that forgets nothing.

Owns the windows, and how long it takes until hits are back after something was lost. Pure.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from loadtests.reports.report import RequestRecord
from loadtests.workloads import Loss, Workload, ideal_hits_by_request

BACK_POINTS = 0.02
"""Hits are back when no more of the prompts is missing than this share."""


class Window(NamedTuple):
    """Requests that arrived from `start` on: prompt tokens; cached ones; those of one endless cache for all;
    and those of an endless cache that lost, with each dead replica, what was nowhere else."""

    start: float
    num_requests: int
    num_tokens: int
    num_hits: int
    num_ideal_hits: int
    num_left_hits: int


def curve(
    workload: Workload, records: Sequence[RequestRecord], losses: Sequence[Loss], seconds: float
) -> tuple[Window, ...]:
    """Return windows of `seconds`, from 0 to the last arrival. `records` are in the workload's order."""
    num_windows = 1 + int(max((record.arrival_seconds for record in records), default=0.0) / seconds)
    counts = [[0, 0, 0, 0, 0] for _ in range(num_windows)]
    possible = ideal_hits_by_request(workload, losses=losses)
    for record, ideal, left in zip(records, ideal_hits_by_request(workload), possible, strict=True):
        window = counts[int(record.arrival_seconds / seconds)]
        for place, value in enumerate(
            (1, record.num_input_tokens, record.num_cached_tokens or 0, ideal.num_cached, left.num_cached)
        ):
            window[place] += value
    return tuple(Window(number * seconds, *each) for number, each in enumerate(counts))


def added(curves: Sequence[Sequence[Window]]) -> tuple[Window, ...]:
    """Several curves as one, as long as the longest."""
    total: list[Window] = []
    for place in range(max(map(len, curves), default=0)):
        windows = [windows[place] for windows in curves if place < len(windows)]
        counts = [sum(values) for values in zip(*(window[1:] for window in windows), strict=True)]
        total.append(Window(windows[0].start, *counts))
    return tuple(total)


def ideal_hits_of(window: Window) -> int:
    return window.num_ideal_hits


def left_hits_of(window: Window) -> int:
    return window.num_left_hits


def back_after(
    windows: Sequence[Window], lost_at: float, goal: Callable[[Window], int] = ideal_hits_of
) -> float | None:
    """Seconds from `lost_at` until the end of the last window that is further than BACK_POINTS from its goal;
    0.0 if none is, None if the last of all is.
    """
    seconds = 0.0
    for place, window in enumerate(windows, start=1):
        end = windows[place].start if place < len(windows) else math.inf
        if end > lost_at and goal(window) - window.num_hits > BACK_POINTS * window.num_tokens:
            seconds = end - lost_at
    return None if seconds == math.inf else seconds


def curve_table(windows: Sequence[Window]) -> str:
    """One window a line."""
    lines = [f"{'from, s':>8}  {'requests':>8}  {'hits':>7}  {'ideal':>7}  {'not lost':>8}"]
    for window in windows:
        hits, ideal, left = (
            f"{100 * count / max(1, window.num_tokens):.1f} %"
            for count in (window.num_hits, window.num_ideal_hits, window.num_left_hits)
        )
        lines.append(f"{window.start:8g}  {window.num_requests:8d}  {hits:>7}  {ideal:>7}  {left:>8}")
    return "\n".join(lines)
