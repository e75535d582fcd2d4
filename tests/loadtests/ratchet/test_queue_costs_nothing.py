"""Where the fleet carries the load, nothing is worse behind the queue than without it.

By each figure's own tolerance, and by 2 % on the average of all rows, for which none may pay with another.
"""

import pytest

from loadtests.ratchet.rows import CARRIED
from loadtests.ratchet.verdict import text, worse, worse_on_average

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("row", CARRIED)
def test_nothing_is_worse_behind_the_queue_than_without_it(row: str) -> None:
    lost = worse({row: CARRIED[row].without_queue.figures}, {row: CARRIED[row].figures})
    assert not lost, f"without the queue -> behind it\n{text(lost)}"


def test_nothing_is_worse_behind_the_queue_on_average() -> None:
    without = {row: own.without_queue.figures for row, own in CARRIED.items()}
    lost = worse_on_average(without, {row: own.figures for row, own in CARRIED.items()})
    assert not lost, f"without the queue -> behind it\n{text(lost)}"
