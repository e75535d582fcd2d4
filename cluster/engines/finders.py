"""Finders: the addresses that an EngineSource names now.

Owns what an answer of each way means. A look returns addresses, or raises SourceFailed; what is believed of
it is `belief.py`'s.
"""

import asyncio
from pathlib import Path
from typing import Protocol

from cluster.config import EngineSource, check_address
from replicas.process.settings import SettingsError

LOOK_SECONDS = 2.0
"""Time between two looks."""

MOST_FILE_BYTES = 2**20

FILE_LINGER_SECONDS = 5.0
"""A file may be read while it is written."""


class SourceFailed(Exception):
    """The source cannot be read; one sentence."""


class Finder(Protocol):
    linger_seconds: float
    """How long a server stays that a look no longer names."""

    async def look(self) -> set[str]:
        """Raises SourceFailed."""

    async def changed(self) -> None:
        """Return when another look may find something else."""

    async def close(self) -> None: ...


class _Polled:
    linger_seconds = 0.0

    async def changed(self) -> None:
        await asyncio.sleep(LOOK_SECONDS)

    async def close(self) -> None:
        pass


class ListFinder(_Polled):
    def __init__(self, urls: tuple[str, ...]) -> None:
        self._urls = {url.rstrip("/") for url in urls}

    async def look(self) -> set[str]:
        return self._urls


class FileFinder(_Polled):
    """An address a line; empty lines and lines that begin with # are left out."""

    linger_seconds = FILE_LINGER_SECONDS

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    async def look(self) -> set[str]:
        try:
            text = await asyncio.to_thread(self._read)
        except (OSError, UnicodeDecodeError) as error:
            raise SourceFailed(f"{self._path} cannot be read: {error}") from error
        lines = [line.strip() for line in text.splitlines()]
        urls = {line.rstrip("/") for line in lines if line and not line.startswith("#")}
        try:
            for url in urls:
                check_address(url)
        except SettingsError as error:
            raise SourceFailed(f"{self._path}: {error}") from error
        return urls

    def _read(self) -> str:
        with self._path.open("rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
        if len(content) > MOST_FILE_BYTES:
            raise OSError("it is longer than a mebibyte")
        return content.decode("utf-8")


def finder_of(source: EngineSource) -> Finder:
    if source.file is not None:
        return FileFinder(source.file)
    return ListFinder(source.urls)
