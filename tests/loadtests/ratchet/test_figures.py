"""No figure is worse than the file says, which `python -m loadtests.ratchet --write` writes anew.

Virtual time: the figures of a commit are the same on every machine, however busy.
"""

import warnings
from collections.abc import Mapping

import pytest

from loadtests.ratchet import index_memory, instructions
from loadtests.ratchet.figures_file import read_figures
from loadtests.ratchet.rows import ROWS
from loadtests.ratchet.verdict import much_better, text, worse
from tests.tools import needed_tool

WRITE = "python -m loadtests.ratchet --write"
AT_ONCE = {
    *(row for row in ROWS if row.endswith(", 1 router") and "one batch" not in row and " x" not in row),
    *(
        "sessions in 32 lanes, device alone",
        "conversations, 4 routers",
        "tool agents x2, 1 router",
        "Zipf, host memory, disk and pulls",
    ),
}
"""A workload each; the others are slow."""

pytestmark = pytest.mark.filterwarnings("default::tests.loadtests.ratchet.test_figures.MuchBetter")


class MuchBetter(UserWarning):
    """The file should be written anew, so that what was won is kept."""


def hold_against_the_file(row: str, figures: Mapping[str, float]) -> None:
    old, new = {row: read_figures()[row]}, {row: figures}
    assert set(old[row]) == set(figures), f"other figures than in the file: {WRITE}"
    if better := much_better(old, new):
        warnings.warn(MuchBetter(f"{WRITE} keeps what was won:\n{text(better)}"), stacklevel=2)
    if lost := worse(old, new):
        pytest.fail(f"worse than before; if that has to be, {WRITE}\n{text(lost)}")


def test_the_file_has_the_rows_that_there_are() -> None:
    rows = [row for row in read_figures() if not row.startswith("instructions")]
    assert rows == [*ROWS, index_memory.ROW]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row in AT_ONCE else pytest.mark.slow) for row in ROWS]
)
def test_no_figure_of_a_workload_is_worse_than_the_file_says(row: str) -> None:
    hold_against_the_file(row, ROWS[row].figures)


def test_an_entry_of_the_index_takes_no_more_memory_than_the_file_says() -> None:
    hold_against_the_file(index_memory.ROW, index_memory.index_figures())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_decisions_and_requests_take_no_more_instructions_than_the_file_says() -> None:
    needed_tool("valgrind")
    if instructions.ROW not in read_figures():
        pytest.skip(f"the file has no {instructions.ROW}")
    hold_against_the_file(instructions.ROW, instructions.count_instructions())
