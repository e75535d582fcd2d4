"""Formats a comparison of runs as Markdown, for a commit, a comment or a results file.

Owns the tables' columns. comparison.py owns figures, their units and the sentence about the winner.
"""

import re
from collections.abc import Sequence

from loadtests.reports.comparison import (
    FIGURES,
    HEADLINES,
    PHASE_HEADS,
    Figure,
    RunSet,
    Variant,
    in_ratio,
    phase_rows,
    range_of,
    ratio,
    short_commit,
    value_of,
    verdict,
)

COLUMNS = (*HEADLINES, *(figure for figure in FIGURES if figure.label in ("Good answers", "Failed requests")))


def markdown(sets: Sequence[RunSet]) -> str:
    """Write a section per test, a table per workload, and a line per policy."""
    lines: list[str] = []
    test = None
    for run_set in sets:
        if run_set.test != test:
            test = run_set.test
            lines += [f"## {_text(test)}", ""]
        lines += [
            f"Workload: {_text(run_set.workload)}",
            "",
            _text(verdict(run_set)),
            "",
            *_table(run_set),
            "",
        ]
        if rows := phase_rows(run_set):
            lines += [_row(PHASE_HEADS), "|---|---|" + "---:|" * (len(PHASE_HEADS) - 2)]
            lines += [*(_row([_text(cell) for cell in row]) for row in rows), ""]
        lines += [*_sources(run_set), ""]
    return "\n".join(lines)


def _table(run_set: RunSet) -> list[str]:
    head = ["policy", "runs", *(figure.label for figure in COLUMNS)]
    rows = [
        [variant.name, str(len(variant.runs)), *(_cell(figure, variant, run_set) for figure in COLUMNS)]
        for variant in run_set.variants
    ]
    return [
        _row(head),
        "|---|" + "---:|" * (len(head) - 1),
        *(_row([_text(cell) for cell in row]) for row in rows),
    ]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(figure: Figure, variant: Variant, run_set: RunSet) -> str:
    text = value_of(figure, variant)
    if variant is not run_set.baseline and figure.is_headline:
        found = ratio(figure, variant, run_set.baseline)
        text += "" if found is None else f", {in_ratio(found)}"
    values = range_of(figure, variant)
    return f"{text} [{values}]" if values else text


def _sources(run_set: RunSet) -> list[str]:
    """List the runs that the figures come from, one line each."""
    lines = []
    for variant in run_set.variants:
        for run in variant.runs:
            info, found = run.run.info, run.figures.reconciliation
            held = "the engines' counters could not be read" if found is None else found.verdict.rstrip(".")
            lines.append(
                f"- {_text(run.name)}: {_text(variant.name)}, seed {info.seed}, commit "
                f"{_text(short_commit(info.commit))}, {_text(info.machine)}, {_text(info.started_at)}; "
                f"{_text(held)}. {_code(info.command)}"
            )
    return lines


def _text(text: str) -> str:
    """Escape a text so that it is no markup and ends no cell."""
    text = re.sub(r"\s+", " ", text)
    return re.sub(r"([\\`*_|<>\[\]~#&])", r"\\\1", text)


def _code(text: str) -> str:
    text = re.sub(r"\s+", " ", text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"
