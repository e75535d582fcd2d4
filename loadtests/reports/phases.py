"""Phases: requests before replicas were killed, just after it, and later. Pure.

Owns the boundaries of phases. report.py owns the figures' meaning.
"""

from dataclasses import dataclass

from loadtests.reports.report import Report, Slo, make_report
from loadtests.reports.run_file import Run

AFTERMATH_SECONDS = 15.0
"""Length of the phase "just after" a kill."""


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    report: Report


def phases_of(run: Run, slo: Slo) -> tuple[Phase, ...]:
    """Divide requests by scheduled time, without the warm-up. None without a kill."""
    kills = run.info.kill_seconds
    if not kills:
        return ()
    names = ("before", "just after", "later")
    found: dict[str, list[int]] = {name: [] for name in names}
    for number, record in enumerate(run.records):
        at = record.arrival_seconds
        if at < run.info.warmup_seconds:
            continue
        if at < min(kills):
            found["before"].append(number)
        elif any(kill <= at < kill + AFTERMATH_SECONDS for kill in kills):
            found["just after"].append(number)
        else:
            found["later"].append(number)
    num_replicas = run.info.num_replicas
    return tuple(
        Phase(
            name, make_report([run.records[number] for number in found[name]], slo, num_replicas=num_replicas)
        )
        for name in names
        if found[name]
    )
