"""ConcurrencyLimit: how many requests a router serves at a time, with a share per client address.

Owns the count. `admission.py` weighs a request's content.
"""

from collections.abc import Iterator

from router.errors import Overloaded
from router.limits.address_shares import AddressShares
from router.shared.instruments import Instrument, gauge


class ConcurrencyLimit:
    def __init__(self, most: int, *, address_share: float) -> None:
        self._held = AddressShares(most, address_share=address_share)

    @property
    def num(self) -> int:
        return self._held.num

    def instruments(self) -> Iterator[Instrument]:
        yield gauge("router_in_flight", "Requests being served", lambda: self.num)

    def hold(self, address: str | None) -> "ConcurrencyHold":
        """Count one request until the context is left. Raises Overloaded without room."""
        if not self._held.take(address):
            whose = "this address" if self._held.has_room(None) else "all clients"
            raise Overloaded(
                f"The router is serving as many requests of {whose} as it can. Please try again in 1s."
            )
        return ConcurrencyHold(self._held, address)


class ConcurrencyHold:
    """One request's place. Leave it once."""

    __slots__ = ("_address", "_held")

    def __init__(self, held: AddressShares, address: str | None) -> None:
        self._held = held
        self._address = address

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._held.add(self._address, -1)
