"""Tally: what a log's prompts come to, and its breaks by habit and place.

Owns the sums, and the bound on how many kinds and examples are kept.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from router.explain.leaves import TURN_FIELDS
from router.explain.linting.habits import ADVICE, WHAT, Habit
from router.explain.linting.linter import Break

MOST_FINDINGS = 1024
"""Beyond, breaks count under their habit alone."""

MOST_EXAMPLES = 8
ELSEWHERE = "…"

_WHOLE_LIST = frozenset({Habit.TOOLS_CHANGED, Habit.TOOL_ORDER, Habit.MODEL, Habit.SALT})


@dataclass(slots=True)
class Finding:
    """Breaks of one kind at one place; `path` has `[*]` for a turn's number where they differ in it."""

    habit: Habit
    path: str
    num_breaks: int = 0
    num_lost_tokens: int = 0
    examples: list[Break] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)

    @property
    def shown_path(self) -> str:
        return next(iter(self.paths)) if len(self.paths) == 1 else self.path

    def add(self, found: Break) -> None:
        self.num_breaks += 1
        self.num_lost_tokens += found.num_lost_tokens
        if len(self.paths) < 2:
            self.paths.add(_place_of(found))
        if len(self.examples) < MOST_EXAMPLES:
            self.examples.append(found)


@dataclass(slots=True)
class Tally:
    num_requests: int = 0
    num_prompts: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_lost_tokens: int = 0
    findings: dict[tuple[Habit, str], Finding] = field(default_factory=dict)

    def add(self, num_tokens: int, num_cached_tokens: int, found: Break | None) -> None:
        self.num_prompts += 1
        self.num_tokens += num_tokens
        self.num_cached_tokens += num_cached_tokens
        if found is None:
            return
        self.num_lost_tokens += found.num_lost_tokens
        path = re.sub(rf"^({'|'.join(TURN_FIELDS)})\[\d+\]", r"\1[*]", _place_of(found))
        key = found.habit, path
        if key not in self.findings and len(self.findings) >= MOST_FINDINGS:
            key = found.habit, ELSEWHERE
        self.findings.setdefault(key, Finding(*key)).add(found)

    @property
    def lost_percent(self) -> float:
        return 100 * self.num_lost_tokens / max(1, self.num_tokens)

    def ordered(self) -> list[Finding]:
        """Return the dearest first."""
        return sorted(self.findings.values(), key=lambda finding: -finding.num_lost_tokens)


def _place_of(found: Break) -> str:
    if found.habit is Habit.MODEL:
        return "model"
    if found.habit is Habit.SALT:
        return "cache_salt"
    if found.habit in _WHOLE_LIST:
        return found.place.path.partition("[")[0]
    return found.place.path or "(template)"


def as_plain(tally: Tally, prefill_rate: float | None) -> dict[str, Any]:
    """For programs."""
    return {
        "num_requests": tally.num_requests,
        "num_prompts": tally.num_prompts,
        "num_tokens": tally.num_tokens,
        "num_cached_tokens_at_best": tally.num_cached_tokens,
        "num_lost_tokens": tally.num_lost_tokens,
        "lost_percent": round(tally.lost_percent, 3),
        "lost_seconds": None if not prefill_rate else round(tally.num_lost_tokens / prefill_rate, 3),
        "findings": [_plain_finding(finding, prefill_rate) for finding in tally.ordered()],
    }


def _plain_finding(finding: Finding, prefill_rate: float | None) -> dict[str, Any]:
    return {
        "habit": finding.habit.value,
        "path": finding.shown_path,
        "what": WHAT[finding.habit],
        "advice": ADVICE[finding.habit],
        "num_breaks": finding.num_breaks,
        "num_lost_tokens": finding.num_lost_tokens,
        "lost_seconds": None if not prefill_rate else round(finding.num_lost_tokens / prefill_rate, 3),
        "examples": [
            {
                "line": found.line,
                "earlier_line": found.earlier_line,
                "token": found.token,
                "path": found.place.path,
                "kind": found.place.kind.value,
                "key": found.place.key,
                "is_certain": found.place.is_certain,
                "num_lost_tokens": found.num_lost_tokens,
            }
            for found in finding.examples
        ],
    }
