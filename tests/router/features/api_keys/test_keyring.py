from hypothesis import given
from hypothesis import strategies as st

from router.errors import KeyFault
from tests.router.features.api_keys.some_keys import ACME, ACME_TENANT, OLD, some_keys


def test_a_key_is_known_by_all_of_its_text() -> None:
    keys = some_keys()
    caller = keys.find(ACME, now=0.0)
    assert not isinstance(caller, KeyFault)
    assert caller.tenant == ACME_TENANT
    for place in range(len(ACME)):
        other = ACME[:place] + ("x" if ACME[place] != "x" else "y") + ACME[place + 1 :]
        assert keys.find(other, now=0.0) is KeyFault.UNKNOWN
    assert keys.find(ACME + "A", now=0.0) is KeyFault.UNKNOWN
    assert keys.find(ACME[:-1], now=0.0) is KeyFault.UNKNOWN


def test_a_key_ends_at_its_time_and_says_so_only_to_who_has_it() -> None:
    keys = some_keys()
    assert not isinstance(keys.find(OLD, now=0.99), KeyFault)
    assert keys.find(OLD, now=1.0) is KeyFault.EXPIRED
    assert keys.find(OLD[:-1] + "x", now=1.0) is KeyFault.UNKNOWN


@given(st.text())
def test_any_text_is_compared(text: str) -> None:
    assert some_keys().find(text, now=0.0) is KeyFault.UNKNOWN
