"""The figures of a closed loop of sessions.

Owns what is counted and the time that a session would take on an idle fleet. Names and units are
`summary.py`'s.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from loadtests.figures import percentiles
from loadtests.reports.report import Slo, make_report
from loadtests.simulation.closed_loop import LoopResult
from loadtests.simulation.summary import distribution_figures, good_share
from loadtests.workloads.sessions import Session, SessionFile
from replicas.simulated_engine.hardware import CostModel

COUNTED_FROM_SECONDS, COUNTED_UNTIL_SECONDS = 300.0, 1500.0
"""Turns a minute: the lanes are all busy by then, and still."""


def session_figures(
    result: LoopResult, file: SessionFile, cost: CostModel, *, num_replicas: int, both: Slo
) -> dict[str, float | None]:
    """All sessions are served to their ends, so that times of different policies compare. `both` limits TTFT
    and TPOT."""
    unloaded = unloaded_seconds(file, cost)
    mains = [each for each in result.sessions if each.session.parent is None]
    elapsed = [each.ended_at - each.began_at for each in mains]
    slowdowns = [seconds / unloaded[each.session.id] for seconds, each in zip(elapsed, mains, strict=True)]
    records = [turn.record for turn in result.turns]
    report = make_report(records, replace(both, tpot=None), num_replicas=num_replicas)
    repeatable = [turn.num_repeatable_tokens for turn in result.turns]
    cached = [min(turn.record.num_cached_tokens or 0, turn.num_repeatable_tokens) for turn in result.turns]
    device = [min(turn.num_device_tokens, turn.num_repeatable_tokens) for turn in result.turns]
    num_counted = sum(COUNTED_FROM_SECONDS <= turn.ended_at < COUNTED_UNTIL_SECONDS for turn in result.turns)
    requests = report.imbalance_requests
    return {
        "session_mean": statistics.fmean(elapsed),
        "session_p90": percentiles(elapsed).p90,
        "slowdown_mean": statistics.fmean(slowdowns),
        "slowdown_max": max(slowdowns),
        "turns_per_minute": 60 * num_counted / (COUNTED_UNTIL_SECONDS - COUNTED_FROM_SECONDS),
        **distribution_figures("ttft", report.ttft),
        **distribution_figures("tpot", report.tpot),
        "good_share": report.good_share,
        "good_both": good_share(records, both),
        "ttft_max": None if report.ttft is None else report.ttft.most,
        "repeatable_cached": _share(cached, repeatable),
        "repeatable_device": _share(device, repeatable),
        "num_recomputed_tokens": sum(repeatable) - sum(cached),
        "num_refusals": result.num_refusals,
        "imbalance_requests": None if requests is None else requests.max_over_mean,
    }


def _share(part: Sequence[int], whole: Sequence[int]) -> float | None:
    return sum(part) / sum(whole) if sum(whole) else None


def unloaded_seconds(file: SessionFile, cost: CostModel) -> Mapping[str, float]:
    """Return each session's time on an idle fleet, from its first turn to its last answer.

    It has pauses, subagents that it waits for, and turns that compute what no earlier one of the session had.
    """
    waits: defaultdict[tuple[str, int], float] = defaultdict(float)
    found: dict[str, float] = {}
    for session in reversed(file.sessions):  # subagents come behind their parents
        seconds = 0.0 if session.parent_turn is None else session.after_seconds
        own = _turn_seconds(session, file.block_tokens, cost)
        pauses = [
            waits[session.id, number] + turn.think_seconds for number, turn in enumerate(session.turns[1:])
        ]
        found[session.id] = sum(own) + sum(pauses)
        if session.parent is not None and session.parent_turn is not None:
            key = (session.parent, session.parent_turn)
            waits[key] = max(waits[key], seconds + found[session.id])
    return found


def _turn_seconds(session: Session, block_tokens: int, cost: CostModel) -> list[float]:
    seen: set[int] = set()
    found = []
    for turn in session.turns:
        num_tokens, num_decodes = turn.num_input_tokens, turn.num_output_tokens - 1
        num_blocks = min(turn.num_leading_blocks(seen), (num_tokens - 1) // block_tokens)
        cached = num_blocks * block_tokens
        seen.update(turn.block_ids)
        new = num_tokens - cached
        prefill = cost.prompt_seconds(cached, new)
        context = num_tokens + (num_decodes + 1) / 2
        found.append(max(cost.d0, prefill) + num_decodes * (cost.d0 + cost.d1 * context))
    return found
