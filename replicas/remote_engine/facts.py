"""ServerFacts: what a server says of itself, in the words that all dialects share.

Pure: parses texts that `server.py` has fetched. What every server must say is an error here if it does not.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from replicas.errors import StartupError
from replicas.protocol.status import Adapter

logger = logging.getLogger(__name__)

MOST_REQUESTS = 100_000
"""More are not believed to be at one server."""

MOST_CACHE_TOKENS = 2**25
"""A larger cache is not believed: at 16 KiB a token it would have 512 GiB, and a share of the index 26 MB."""


class ServerModel(NamedTuple):
    """A model of `/v1/models`. `root` is where the server found it: a folder or a name on a hub. `aliases`
    are its other names. `num_ignored` names are too many, or no names. `owned_by` is mostly the server's
    kind; `is_router`: a router of Kvasir has it."""

    served_name: str
    root: str
    context_length: int | None
    adapters: tuple[Adapter, ...]
    aliases: tuple[str, ...] = ()
    num_ignored: int = 0
    owned_by: str = ""

    @property
    def is_router(self) -> bool:
        return self.owned_by == "kvasir"


@dataclass(frozen=True, slots=True)
class EventSource:
    """The source of one rank's events. `binds` is false if the server connects to us instead."""

    endpoint: str
    replay_endpoint: str | None
    topic: str
    binds: bool


class ServerLoad(NamedTuple):
    """One look at one rank. `started_at` names the server's start, and changes with it."""

    started_at: str
    num_running: int = 0
    num_waiting: int = 0
    share_used: float = 0.0


def bounded(number: float) -> int:
    """Bound a number of requests that a server says. Raises ValueError or TypeError."""
    return int(max(0, min(number, MOST_REQUESTS)))


class CacheSizes(NamedTuple):
    """`num_blocks` hold KV; a block has one or more of the server's pages."""

    block_size: int
    num_blocks: int
    page_size: int

    def believed(self) -> "CacheSizes":
        """Return the part of it that can be."""
        most = max(1, MOST_CACHE_TOKENS // self.block_size)
        if self.num_blocks <= most:
            return self
        logger.warning("the server says that its cache has %d blocks; %d are believed", self.num_blocks, most)
        return self._replace(num_blocks=most)


def reachable(endpoint: str, host: str) -> tuple[str, bool]:
    """Replace a wildcard by the server's host; whether the server binds: vLLM connects to any other host."""
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return endpoint, True
    its_host, _, port = rest.rpartition(":")
    if its_host.strip("[]") in ("*", "::", "0.0.0.0", ""):
        return f"tcp://{f'[{host}]' if ':' in host else host}:{port}", True
    return endpoint, False


def is_of_own_host(endpoint: str, url: str) -> bool:
    """Whether an address that a server names is on its host. A Unix socket is on that of one on loopback."""
    scheme, _, rest = endpoint.partition("://")
    hosts = {urlsplit(url).hostname or "", rest.rpartition(":")[0].strip("[]")}
    if scheme == "ipc":
        return _is_loopback(urlsplit(url).hostname or "")
    return scheme == "tcp" and (len(hosts) == 1 or all(map(_is_loopback, hosts)))


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def declared_fingerprint(root: str, files: Mapping[str, bytes]) -> str:
    """Identify a model by where the server found it and by our text files: its weights cannot be read.

    Never equals the fingerprint of weights.
    """
    digest = hashlib.sha256(f"declared\0{root}".encode())
    for name, content in sorted(files.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def tokens_of(answer: bytes) -> list[int]:
    """Parse an answer of `/tokenize`. Raises StartupError."""
    try:
        tokens: Any = json.loads(answer)["tokens"]
        return [int(token) for token in tokens]
    except (ValueError, LookupError, TypeError) as error:
        raise StartupError(f"the server's tokens cannot be read: {error!r}") from error
