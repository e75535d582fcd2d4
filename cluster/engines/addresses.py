"""SourceFailed, and urls_of(): addresses of servers from IP addresses and ports."""

import ipaddress
from collections.abc import Iterable


class SourceFailed(Exception):
    """The source cannot be read; one sentence."""


def urls_of(places: Iterable[tuple[str, int]]) -> set[str]:
    """IPv6 counts only if no address is of IPv4: a server with both is one. Raises ValueError."""
    found = [(ipaddress.ip_address(address), port) for address, port in places]
    version = min((address.version for address, _ in found), default=4)
    return {
        f"http://{address}:{port}" if version == 4 else f"http://[{address}]:{port}"
        for address, port in found
        if address.version == version
    }
