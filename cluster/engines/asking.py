"""Asker: asks servers for their data-parallel ranks.

Owns what each has said, and when it is asked again: one that does not answer more and more rarely. What it
said before holds until it says something else.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from cluster.config import BackoffSpec, FoundServer
from replicas.process.settings import SettingsError, without_password
from replicas.remote_engine.server import read_key
from replicas.remote_engine.sglang_dialect import ranks_of

ANSWER_SECONDS = 5.0

AGAIN_SECONDS = 30.0
"""Time until a server that has answered is asked again: one that is started anew may have other ranks."""

MOST_COMPLAINTS = 3
MOST_RANKS = 1024


@dataclass(slots=True)
class _Asked:
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
        self._asked: dict[str, _Asked] = {}
        self._backoff = BackoffSpec(initial_seconds=2.0)
        self._client = httpx.AsyncClient(
            timeout=ANSWER_SECONDS,
            follow_redirects=False,
            trust_env=False,
            limits=httpx.Limits(max_connections=16),
        )

    async def close(self) -> None:
        await self._client.aclose()

    def know(self, servers: Sequence[FoundServer]) -> None:
        """Take over what servers have said to an earlier asker."""
        for server in servers:
            asked = self._asked.setdefault(server.url, _Asked(()))
            if server.rank is not None:
                asked.ranks = (*(asked.ranks or ()), server.rank)

    async def ask(self, urls: Sequence[str]) -> list[FoundServer]:
        """Ask those that are due; return the ranks of all that have ever answered."""
        self._asked = {url: self._asked.get(url) or _Asked() for url in urls}
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
        silent = [
            f"{without_password(url)} {asked.failure}"
            for url, asked in self._asked.items()
            if asked.ranks is None
        ]
        more = "" if len(silent) <= MOST_COMPLAINTS else f"; and {len(silent) - MOST_COMPLAINTS} more"
        return "; ".join(silent[:MOST_COMPLAINTS]) + more or None

    async def _ranks(self, url: str, headers: Mapping[str, str]) -> Sequence[int]:
        """Raises HTTPError, ValueError or TypeError."""
        if self._takes_bodies:
            _json(await self._client.get(f"{url}/v1/models", headers=headers))
            return ()
        answer = await self._client.get(f"{url}/kv_event_sources", headers=headers)
        if answer.status_code != 404:
            return sorted(int(rank) for rank in _json(answer))
        answer = await self._client.get(f"{url}/server_info", headers=headers)  # of SGLang
        if answer.status_code == 404:
            return ()  # an old vLLM
        info = _json(answer)
        return range(ranks_of(info)) if isinstance(info, dict) else ()

    async def _ask(self, url: str, asked: _Asked) -> None:
        try:
            key = await asyncio.to_thread(read_key, self._key_file)
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            ranks = await self._ranks(url, headers)
            if len(ranks) > MOST_RANKS:
                raise ValueError("it names too many ranks")
        except (httpx.HTTPError, httpx.InvalidURL, SettingsError, ValueError, TypeError) as error:
            asked.num_failures += 1
            asked.failure = f"cannot be joined yet: {' '.join(str(error).split()) or repr(error)}"
            asked.ask_at = time.monotonic() + self._backoff.delay_seconds(asked.num_failures)
        else:
            asked.ranks, asked.num_failures, asked.failure = tuple(ranks), 0, None
            asked.ask_at = time.monotonic() + AGAIN_SECONDS


def _json(answer: httpx.Response) -> Any:
    if answer.status_code != 200:
        raise ValueError(f"it answers {answer.status_code}")
    return json.loads(answer.content)
