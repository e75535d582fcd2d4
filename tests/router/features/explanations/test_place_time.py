"""How much processor time may go to looking for places."""

from router.features.explanations.place_search import Allowance


def test_time_is_spent_as_it_passes_and_little_of_it_is_saved_up() -> None:
    now = 0.0
    allowance = Allowance(0.5, 2.0, lambda: now)
    for passed in (2.0, 1000.0):
        allowance.spend(2.0)
        assert not allowance.is_left()
        now += passed
        assert allowance.is_left()
    allowance.spend(2.0)
    assert not allowance.is_left()
