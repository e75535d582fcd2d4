"""Parses Host, Origin and Fetch metadata: where a request comes from, and whom it calls.

Owns what counts as this machine and as a page of another origin. `access.py` decides who is let in.
"""

import functools
import ipaddress
import re

_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^:\[\]]+))(?::\d{1,5})?")

_LONGEST_HOST = 255

EVERY_ORIGIN = "*"
_ORIGIN = re.compile(
    r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[^\s/?#@,:\[\]\"'*]+)(?::\d{1,5})?/?", re.IGNORECASE
)

_OWN_SITES = (b"same-origin", b"none")
"""Browsers' values for a request without another page; `none` is a typed address or a bookmark."""


def host_name(host: bytes) -> str | None:
    """Return the name or address in a Host header, in lower case and without port; None if it is neither."""
    found = _HOST.fullmatch(host.decode("latin-1"))
    if found is None:
        return None
    name: str = found["v6"] or found["name"]
    return name.lower()


@functools.lru_cache(maxsize=64)
def calls_loopback(host: bytes) -> bool:
    """Whether a Host header names this machine, and nothing but it."""
    name = host_name(host) if len(host) <= _LONGEST_HOST else None
    return name is not None and means_loopback(name)


def means_loopback(name: str) -> bool:
    """A name that no name server can point elsewhere, or an address."""
    return name == "localhost" or is_loopback(name)


def is_loopback(address: str) -> bool:
    try:
        return _plain_address(address).is_loopback
    except ValueError:
        return False


def calls_address(host: bytes, address: str) -> bool:
    """Whether a Host header names this address."""
    name = host_name(host)
    try:
        return name is not None and _plain_address(name) == _plain_address(address)
    except ValueError:
        return False


def _plain_address(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address, as IPv4 if possible. Raises ValueError."""
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed


def may_be_origin(text: str) -> bool:
    """Whether browsers name pages of some origin so, or it stands for every origin."""
    return text == EVERY_ORIGIN or _ORIGIN.fullmatch(text) is not None


def is_of_other_origin(site: bytes | None, origin: bytes | None, host: bytes | None) -> bool:
    """Whether a browser sends this for a page of another origin. Programs say neither.

    Sec-Fetch-Site is what the browser found, whatever proxies have made of Host; browsers leave it out where
    they do not trust the connection, and there Origin has to do. A scheme may have changed on the way.
    """
    if site is not None:
        return site not in _OWN_SITES
    if origin is None:
        return False
    return host is None or origin.lower().partition(b"://")[2] != host.lower()
