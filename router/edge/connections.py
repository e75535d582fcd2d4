"""Connections: clients connected, in all and per address, and why connections ended.

Owns the limits and the counts. Knows no protocol: `http_protocol.py` owns the connections themselves.

One address may take a share of all. Behind a load balancer all users come from one address, so the share is
half by default, and the whole is generous. A Unix socket has no address and no such limit.
"""

import enum
import ipaddress
from collections.abc import Iterator

from router.config import RouterConfig
from router.limits.address_shares import AddressShares
from router.shared.instruments import Instrument, counter, gauge

IPV6_NETWORK_BITS = 64
"""A client with an IPv6 address has as many as fit into a network of this size."""

MAX_FAREWELLS = 256
"""Refused connections that are kept for a moment, so that their clients can read why."""


class Ended(enum.StrEnum):
    """Why the router ended a connection."""

    TOO_MANY = "too_many"
    TOO_MANY_OF_ADDRESS = "too_many_of_address"
    HEAD_TOO_LARGE = "head_too_large"
    HEAD_TOO_SLOW = "head_too_slow"
    """Or no request at all, or the rest of a body that is no longer wanted."""
    TOO_MANY_QUEUED = "too_many_queued"
    """Requests sent before the answers to earlier ones."""
    NOT_READ = "not_read"
    """The client does not read its answer."""


class Connections:
    """Connections of one listener. One address may have `address_share` of them."""

    def __init__(
        self, max_open: int, *, address_share: float, head_seconds: float, write_seconds: float
    ) -> None:
        self.head_seconds = head_seconds
        self.write_seconds = write_seconds
        self.num_farewells = 0
        self.max_open = max_open
        self._open = AddressShares(max_open, address_share=address_share)
        self.num_ended = dict.fromkeys(Ended, 0)

    @classmethod
    def of(cls, config: RouterConfig) -> "Connections":
        return cls(
            config.max_connections,
            address_share=config.address_share,
            head_seconds=config.head_seconds,
            write_seconds=config.write_seconds,
        )

    def enter(self, address: str | None) -> Ended | None:
        """Count a connection; or return why not, without counting it."""
        if self._open.num >= self.max_open:
            return Ended.TOO_MANY
        if not self._open.has_room(address):
            return Ended.TOO_MANY_OF_ADDRESS
        self._open.add(address)
        return None

    def leave(self, address: str | None) -> None:
        self._open.add(address, -1)

    def count(self, reason: Ended) -> None:
        self.num_ended[reason] += 1

    @property
    def num_open(self) -> int:
        return self._open.num

    def instruments(self) -> Iterator[Instrument]:
        yield gauge("router_connections", "Client connections", lambda: self.num_open)
        yield gauge("router_connections_limit", "Limit of client connections", lambda: self.max_open)
        yield counter(
            "router_ended_connections_total",
            "Connections that the router refused or closed, by reason",
            lambda: self.num_ended,
            "reason",
        )


def address_of(client: tuple[str, int] | None) -> str | None:
    """Return the key by which a peer is counted: its IPv4 address, or its IPv6 network."""
    if client is None or not client[0]:
        return None
    host = client[0]
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), IPV6_NETWORK_BITS), strict=False))
