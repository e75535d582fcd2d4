"""JoinedServer: what `kvasir up --join` must know of a server that runs already.

Owns the questions before anything starts: its model, its ranks and its blocks.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cluster.errors import ClusterError
from replicas.errors import StartupError
from replicas.remote_engine.facts import read_cache_sizes, read_models
from replicas.remote_engine.server import Server


@dataclass(frozen=True, slots=True)
class JoinedServer:
    """One data-parallel rank of a server; `rank` None if it has no others. `name` is a pool's."""

    url: str
    name: str
    rank: int | None
    served_name: str
    root: str
    block_size: int


def ask_servers(urls: list[str], key: str | None) -> list[JoinedServer]:
    """Raises ClusterError for a server that does not answer, and for servers that differ."""
    joined = [rank for url in urls for rank in _ask(url, key)]
    for one in joined:
        if (one.served_name, one.block_size) != (joined[0].served_name, joined[0].block_size):
            raise ClusterError(
                f"{joined[0].url} serves {joined[0].served_name} with blocks of {joined[0].block_size}"
                f" tokens, {one.url} {one.served_name} with {one.block_size}: they cannot share a name"
            )
    if len({one.name for one in joined}) != len(joined):
        raise ClusterError("a server is joined twice")
    return joined


def _ask(url: str, key: str | None) -> list[JoinedServer]:
    if not url.startswith(("http://", "https://")):
        raise ClusterError(f"--join takes a server's address, such as http://127.0.0.1:8000, not {url}")
    server = Server(url, key=key, rank=None, tell=lambda _: None)
    try:
        model = read_models(server.ask("/v1/models"), None)
        metrics = server.ask("/metrics").decode()
        ranks = [int(rank) for rank in json.loads(server.ask("/kv_event_sources"))] or [0]
        sizes = read_cache_sizes(metrics, ranks[0])
    except (StartupError, ValueError, AttributeError) as error:
        raise ClusterError(f"{url} cannot be joined: {error}") from error
    finally:
        server.close()
    where = re.sub(r"[^A-Za-z0-9.]+", "-", urlsplit(url).netloc.rpartition("@")[2])
    return [
        JoinedServer(
            url,
            where if len(ranks) == 1 else f"{where}-rank{rank}",
            None if len(ranks) == 1 else rank,
            model.served_name,
            model.root,
            sizes.block_size,
        )
        for rank in ranks
    ]


def folder_of(servers: list[JoinedServer], model: str | None) -> str:
    """Return the folder with the model's text files. Raises ClusterError if none is given or near."""
    if model is not None:
        return model
    root = Path(servers[0].root)
    if not root.is_dir():
        raise ClusterError(
            f"{servers[0].url} has its model from {root}, which is no folder here: give --model DIR, a folder"
            " with the model's config.json and tokenizer files; weights are not needed"
        )
    return str(root)
