"""Finders: the addresses that an EngineSource names now.

Owns what an answer of each way means. A look returns addresses, or raises SourceFailed; what is believed of
it is `belief.py`'s.
"""

import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from cluster.config import EngineSource
from cluster.engines.addresses import SourceFailed, urls_of
from cluster.engines.kubernetes import KubernetesFinder
from replicas.config import server_address
from replicas.process.complaints import Complaints
from replicas.process.secret_file import open_file_complaint
from replicas.process.settings import SettingsError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Time between two looks."""

MOST_FILE_BYTES = 2**20

FILE_LINGER_SECONDS = 5.0
"""A file may be read while it is written."""

DNS_LINGER_SECONDS = 30.0
"""An answer may have a part of many addresses only."""

DNS_SECONDS = 5.0


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
        self._urls = {server_address(url) for url in urls}

    async def look(self) -> set[str]:
        return self._urls


class FileFinder(_Polled):
    """An address a line; empty lines and lines that begin with # are left out."""

    linger_seconds = FILE_LINGER_SECONDS

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._complaints = Complaints(logger)

    async def look(self) -> set[str]:
        try:
            text = await asyncio.to_thread(self._read)
        except (OSError, UnicodeDecodeError) as error:
            raise SourceFailed(f"{self._path} cannot be read: {error}") from error
        lines = [line.strip() for line in text.splitlines()]
        try:
            return {server_address(line) for line in lines if line and not line.startswith("#")}
        except SettingsError as error:
            raise SourceFailed(f"{self._path}: {error}") from error

    def _read(self) -> str:
        if self._path.is_fifo():
            raise OSError("it is a pipe, which cannot be read again")
        with self._path.open("rb") as file:
            complaint = open_file_complaint(self._path, os.fstat(file.fileno()).st_mode, is_secret=False)
            content = file.read(MOST_FILE_BYTES + 1)
        if complaint is not None:  # each server that they write there gets the key and prompts
            self._complaints.say("mode", complaint)
        else:
            self._complaints.settle("mode")
        if len(content) > MOST_FILE_BYTES:
            raise OSError("it is longer than a mebibyte")
        return content.decode("utf-8")


class DnsFinder(_Polled):
    """All addresses of a name, asked of the machine's resolver."""

    linger_seconds = DNS_LINGER_SECONDS

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), parts.port or 80
        self._asked: asyncio.Future[list[Any]] | None = None
        """One question at a time: a resolver that hangs holds a thread."""

    async def look(self) -> set[str]:
        if self._asked is None:
            loop = asyncio.get_running_loop()
            question = loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._asked = asyncio.ensure_future(question)
        done, _ = await asyncio.wait([self._asked], timeout=DNS_SECONDS)
        if not done:
            raise SourceFailed(f"DNS does not answer for {self._host}")
        asked, self._asked = self._asked, None
        try:
            found = asked.result()
            return urls_of((str(address[0]), self._port) for *_, address in found)
        except socket.gaierror as error:
            if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
                return set()
            raise SourceFailed(f"DNS does not know {self._host}: {error.strerror}") from error
        except (OSError, ValueError) as error:
            raise SourceFailed(f"DNS cannot be asked for {self._host}: {error!r}") from error


def finder_of(source: EngineSource) -> Finder:
    if source.file is not None:
        return FileFinder(source.file)
    if source.dns is not None:
        return DnsFinder(source.dns)
    if source.service is not None or source.inference_pool is not None:
        return KubernetesFinder(source)
    return ListFinder(source.urls)
