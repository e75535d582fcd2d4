"""JoinedServer: what `kvasir up --join` must know of servers that run already, before anything starts.

Owns the questions: which model they have, and in which blocks.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cluster.config import EngineSource
from cluster.engines.addresses import SourceFailed
from cluster.engines.finders import finder_of
from cluster.errors import ClusterError
from replicas.errors import StartupError
from replicas.openai_engine.engine import BLOCK_SIZE
from replicas.remote_engine.model_list import MODELS_PATH, read_models
from replicas.remote_engine.probes import find_dialect
from replicas.remote_engine.server import Server


@dataclass(frozen=True, slots=True)
class JoinedServer:
    url: str
    served_name: str
    root: str
    block_size: int


def ask_servers(source: EngineSource, key: str | None, *, takes_bodies: bool = False) -> JoinedServer:
    """Return one of the servers; `takes_bodies` if they are asked for no more than the names of models.
    Raises ClusterError if a given one does not answer, if given ones differ, and if of found ones none
    answers."""
    ask = _ask_name if takes_bodies else _ask
    if not source.urls:
        return _ask_any(_look(source), partial(ask, key=key))
    first, *others = [ask(url, key) for url in source.urls]
    for one in others:
        if (one.served_name, one.block_size) != (first.served_name, first.block_size):
            raise ClusterError(
                f"{first.url} serves {first.served_name} with blocks of {first.block_size} tokens,"
                f" {one.url} {one.served_name} with {one.block_size}: they cannot share a name"
            )
    return first


def _look(source: EngineSource) -> list[str]:
    async def look() -> set[str]:
        finder = finder_of(source)
        try:
            return await finder.look()
        finally:
            await finder.close()

    try:
        return sorted(asyncio.run(look()))[: source.at_most]
    except SourceFailed as error:
        raise ClusterError(str(error)) from error


def _ask_any(urls: Collection[str], ask: Callable[[str], JoinedServer]) -> JoinedServer:
    why = "no server is named"
    for url in urls:
        try:
            return ask(url)
        except ClusterError as error:
            why = str(error)
    raise ClusterError(f"there is no server to join yet: {why}")


def _ask(url: str, key: str | None) -> JoinedServer:
    server = Server(url, key=key, rank=None, tell=lambda _: None)
    try:
        dialect = find_dialect(server.ask, url, rank=None)
    except StartupError as error:
        raise ClusterError(f"{url} cannot be joined: {error}") from error
    finally:
        server.close()
    model = dialect.model
    return JoinedServer(url, model.served_name, model.root, dialect.sizes.block_size)


def _ask_name(url: str, key: str | None) -> JoinedServer:
    server = Server(url, key=key, rank=None, tell=lambda _: None)
    try:
        served = read_models(server.ask(MODELS_PATH), None)
    except StartupError as error:
        raise ClusterError(f"{url} cannot be joined: {error}") from error
    finally:
        server.close()
    return JoinedServer(url, served.served_name, "", BLOCK_SIZE)


def folder_of(server: JoinedServer, model: str | None) -> str:
    """Return the folder with the model's text files. Raises ClusterError if none is given or near."""
    if model is not None:
        return model
    root = Path(server.root)
    if not root.is_dir():
        raise ClusterError(
            f"{server.url} has its model from {root}, which is no folder here: give --model DIR, a folder"
            " with the model's config.json and tokenizer files; weights are not needed"
        )
    return str(root)
