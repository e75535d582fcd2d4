"""Asker: asks servers for their data-parallel ranks.

Owns what each has said, and when it is asked again: one that does not answer more and more rarely. What it
said before holds until it says something else.
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from cluster.config import BackoffSpec, FoundServer
from replicas.remote_engine.server import KEY_ADVICE, KEY_STATUSES, check_plain, read_key, read_whole
from replicas.remote_engine.sglang_dialect import ranks_of

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request

ANSWER_SECONDS = 5.0

AGAIN_SECONDS = 30.0
"""Time until a server that has answered is asked again: one that is started anew may have other ranks."""

MOST_BYTES = 2**24
MOST_COMPLAINTS = 3
MOST_RANKS = 1024


@dataclass(slots=True)
class _AskedServer:
    """`ranks` None until the server has answered; empty if it has only one."""

    ranks: tuple[int, ...] | None = None
    num_failures: int = 0
    ask_at: float = 0.0
    failure: str | None = None


class Asker:
    """Closes with `close`."""

    def __init__(self, key_file: str | None, *, takes_bodies: bool = False) -> None:
        self._key_file = key_file
        self._takes_bodies = takes_bodies
        self._asked: dict[str, _AskedServer] = {}
        self._backoff = BackoffSpec(initial_seconds=2.0)
        self._client = httpx.AsyncClient(
            headers={"accept-encoding": "identity"},
            timeout=ANSWER_SECONDS,
            verify=httpx.create_ssl_context(),  # with the CAs of SSL_CERT_FILE
            follow_redirects=False,
            trust_env=False,
            limits=httpx.Limits(max_connections=16),
        )

    async def close(self) -> None:
        await self._client.aclose()

    def know(self, servers: Sequence[FoundServer]) -> None:
        """Take over what servers have said to an earlier asker."""
        for server in servers:
            asked = self._asked.setdefault(server.url, _AskedServer(()))
            if server.rank is not None:
                asked.ranks = (*(asked.ranks or ()), server.rank)

    async def ask(self, urls: Sequence[str]) -> list[FoundServer]:
        """Ask those that are due; return the ranks of all that have ever answered."""
        self._asked = {url: self._asked.get(url) or _AskedServer() for url in urls}
        now = time.monotonic()
        await asyncio.gather(
            *(self._ask(url, asked) for url, asked in self._asked.items() if asked.ask_at <= now)
        )
        return [
            FoundServer(url, rank)
            for url, asked in self._asked.items()
            if asked.ranks is not None
            for rank in (asked.ranks if len(asked.ranks) > 1 else (None,))
        ]

    @property
    def complaint(self) -> str | None:
        """Name some of the servers that have not answered yet."""
        silent = [f"{url} {asked.failure}" for url, asked in self._asked.items() if asked.ranks is None]
        more = "" if len(silent) <= MOST_COMPLAINTS else f"; and {len(silent) - MOST_COMPLAINTS} more"
        return "; ".join(silent[:MOST_COMPLAINTS]) + more or None

    async def _ranks(self, url: str, headers: Mapping[str, str]) -> Sequence[int]:
        if self._takes_bodies:
            if await self._said(f"{url}/v1/models", headers) is None:
                raise ValueError("it answers 404")
            return ()
        sources = await self._said(f"{url}/kv_event_sources", headers)
        if sources is not None:
            return sorted({int(rank) for rank in sources})
        info = await self._said(f"{url}/server_info", headers)  # of SGLang; an old vLLM has none
        return range(ranks_of(info)) if isinstance(info, dict) else ()

    async def _said(self, url: str, headers: Mapping[str, str]) -> Any:
        """None where there is nothing."""
        async with self._client.stream("GET", url, headers=headers) as answer:
            check_plain(answer.headers)
            content = await read_whole(answer.aiter_raw(), MOST_BYTES)
        if answer.status_code == 404:
            return None
        if answer.status_code != 200:
            advice = f": {KEY_ADVICE}" if answer.status_code in KEY_STATUSES else ""
            raise ValueError(f"it answers {answer.status_code}{advice}")
        return json.loads(content)

    async def _ask(self, url: str, asked: _AskedServer) -> None:
        try:
            key = await asyncio.to_thread(read_key, self._key_file)
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            async with asyncio.timeout(ANSWER_SECONDS):
                ranks = await self._ranks(url, headers)
            if len(ranks) > MOST_RANKS or min(ranks, default=0) < 0:
                raise ValueError("it names ranks that cannot be")
        except Exception as error:  # of any kind: the others are asked all the same
            asked.num_failures += 1
            asked.failure = f"cannot be joined yet: {' '.join(str(error).split()) or repr(error)}"
            asked.ask_at = time.monotonic() + self._backoff.delay_seconds(asked.num_failures)
        else:
            asked.ranks, asked.num_failures, asked.failure = tuple(ranks), 0, None
            asked.ask_at = time.monotonic() + AGAIN_SECONDS
