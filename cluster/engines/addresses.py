"""SourceFailed, and urls_of(): addresses of servers from IP addresses and ports."""

import ipaddress
from collections.abc import Iterable


class SourceFailed(Exception):
    """The source cannot be read; one sentence."""


def urls_of(places: Iterable[tuple[str, int]]) -> set[str]:
    """IPv6 counts only if no address is of IPv4: a server with both is one. Raises ValueError, also for a
    link-local address: metadata services have these."""
    found = [(ipaddress.ip_address(address), port) for address, port in places]
    for address, _ in found:
        if address.is_link_local:
            raise ValueError(f"{address} is link-local, and no server of models")
    version = min((address.version for address, _ in found), default=4)
    return {
        f"http://{address}:{port}" if version == 4 else f"http://[{address}]:{port}"
        for address, port in found
        if address.version == version
    }
