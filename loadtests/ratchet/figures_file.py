"""The file of figures: what each row came to when it was written last.

Owns its place and its form: a row a line, so that a diff shows what a change has cost.
"""

import json
from pathlib import Path

from loadtests.ratchet.verdict import Figures

FILE = Path(__file__).with_name("figures.json")
NUM_DIGITS = 4


def read_figures() -> Figures:
    figures: Figures = json.loads(FILE.read_text(encoding="utf-8"))
    return figures


def write_figures(figures: Figures) -> None:
    rows = (
        f"  {json.dumps(row)}: {json.dumps({name: rounded(value) for name, value in own.items()})}"
        for row, own in figures.items()
    )
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def rounded(value: float) -> float:
    return float(f"{value:.{NUM_DIGITS}g}")
