"""Computes and words what became of sessions of agents in a closed loop. Pure.

Owns these figures' meaning. A session's time: from its first turn's time to the end of its last answer, over
main sessions all of whose turns were answered. A turn waits from its time to its first token.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtests.figures import percentiles
from loadtests.reports.report import RequestRecord

MOST_SHOWN = 10
"""Failed sessions that are named."""


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """None without a session that ended, or a turn that was answered."""

    num_sessions: int
    num_ended: int
    num_failed: int
    failed: tuple[str, ...]
    """Main sessions and subagents, and the error of each."""
    mean_seconds: float | None
    p90_seconds: float | None
    turns_per_minute: float
    longest_wait_seconds: float | None
    num_retries: int


def session_figures(records: Sequence[RequestRecord], main_turns: Mapping[str, int]) -> SessionFigures:
    """Figures of all records of a run. `main_turns` has how many turns each main session has."""
    by_session: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        by_session[record.session or ""].append(record)
    failed = {
        name: record.error for name, of in by_session.items() for record in of if record.error is not None
    }
    times = [
        _end(of[-1]) - of[0].arrival_seconds
        for name, of in by_session.items()
        if len(of) == main_turns.get(name) and name not in failed
    ]
    answered = [record for record in records if record.error is None]
    minutes = (max(map(_end, records)) - min(each.arrival_seconds for each in records)) / 60 if records else 0
    waits = [each.lateness_seconds + (each.ttft_seconds or 0.0) for each in answered]
    return SessionFigures(
        len(main_turns),
        len(times),
        len(failed),
        tuple(f"{name}: {error}" for name, error in failed.items()),
        statistics.fmean(times) if times else None,
        percentiles(times).p90 if times else None,
        len(answered) / minutes if minutes else 0.0,
        max(waits, default=None),
        sum(record.num_retries for record in records),
    )


def render_sessions(figures: SessionFigures) -> str:
    """Format them in the lines of a report."""
    ended = f"{figures.num_ended} of {figures.num_sessions} ended"
    if figures.mean_seconds is not None and figures.p90_seconds is not None:
        ended += f", mean {figures.mean_seconds:.1f} s   p90 {figures.p90_seconds:.1f} s"
    turns = f"{figures.turns_per_minute:.1f} a minute"
    if figures.longest_wait_seconds is not None:
        turns += f", longest wait {figures.longest_wait_seconds:.2f} s"
    rows = [("sessions", ended), ("turns", f"{turns}, {figures.num_retries} retries")]
    rows += [("failed", text) for text in figures.failed[:MOST_SHOWN]]
    if (num_more := figures.num_failed - MOST_SHOWN) > 0:
        rows.append(("failed", f"and {num_more} more"))
    return "\n".join(f"{name:<20}{text}" for name, text in rows)


def _end(record: RequestRecord) -> float:
    return record.arrival_seconds + record.lateness_seconds + (record.e2e_seconds or 0.0)
