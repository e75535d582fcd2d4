"""BodyBudget: the memory of all request bodies, from their first byte until they have been prepared.

Owns the counts. Bytes count as they arrive, and a body without room is refused. `large_bodies/` bounds
the values in a body. Another such budget counts the images of requests being served.
"""

from collections.abc import Iterator
from typing import NoReturn

from router.errors import BodiesFull
from router.limits.address_shares import AddressShares
from router.shared.instruments import Instrument, counter, gauge


class BodyBudget:
    """`address_share` of it may be one address's."""

    def __init__(self, max_bytes: int, *, address_share: float) -> None:
        self.max_bytes = max_bytes
        self._held = AddressShares(max_bytes, address_share=address_share)
        self.num_refused = 0

    def hold(self, address: str | None) -> "BodyHold":
        """For one body, as a context."""
        return BodyHold(self, self._held, address)

    @property
    def num_bytes(self) -> int:
        return self._held.num

    def body_instruments(self) -> Iterator[Instrument]:
        """Instruments of a budget for request bodies."""
        yield gauge(
            "router_body_bytes",
            "Memory of request bodies that are being read or prepared",
            lambda: self.num_bytes,
        )
        yield gauge(
            "router_body_bytes_limit", "Limit of the memory of request bodies", lambda: self.max_bytes
        )
        yield counter(
            "router_refused_bodies_total",
            "Request bodies refused because all bodies together used too much memory",
            lambda: self.num_refused,
        )

    def image_instruments(self) -> Iterator[Instrument]:
        """Instruments of a budget for images."""
        yield gauge(
            "router_image_memory_bytes",
            "Memory of the images of requests that are being served",
            lambda: self.num_bytes,
        )
        yield counter(
            "router_image_memory_refusals_total",
            "Requests refused because images took too much memory",
            lambda: self.num_refused,
        )


class BodyHold:
    """One body's reservation. Leaving it returns what was not returned before."""

    __slots__ = ("_address", "_budget", "_held", "_num_bytes")

    def __init__(self, budget: BodyBudget, held: AddressShares, address: str | None) -> None:
        self._budget = budget
        self._held = held
        self._address = address
        self._num_bytes = 0

    def __enter__(self) -> "BodyHold":
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def expect(self, num_bytes: int) -> None:
        """Raises BodiesFull before anything is read, where all of it would not fit now."""
        if not self._held.has_room(self._address, num_bytes):
            self._refuse()

    def take(self, num_bytes: int) -> None:
        """For bytes that have come. Raises BodiesFull."""
        if not self._held.take(self._address, num_bytes):
            self._refuse()
        self._num_bytes += num_bytes

    def give_back(self) -> None:
        """Return everything; there may be nothing."""
        if self._num_bytes:
            self._held.add(self._address, -self._num_bytes)
            self._num_bytes = 0

    def _refuse(self) -> NoReturn:
        self._budget.num_refused += 1
        raise BodiesFull("The router has no memory for more request bodies at the moment.")
