"""Connections that bring no request are closed.

Owns the time that the head of a request may take; the body's is watched where it is read
(`router/api/http.py`), and idle time between requests by uvicorn. Knows nothing of what is asked.
"""

import asyncio
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def protocol_with_deadline(head_seconds: float) -> type[asyncio.Protocol]:
    """Uvicorn's protocol, with a deadline for the head of each request and for the first one to begin."""

    class Protocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start()

        def on_message_begin(self) -> None:
            self._start()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._stop()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _start(self) -> None:
            self._stop()
            self._deadline = self.loop.call_later(head_seconds, self.transport.close)

        def _stop(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return cast(type[asyncio.Protocol], Protocol)
