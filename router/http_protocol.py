"""Connections that bring no request are closed.

Owns the time that the head of a request may take; the body's is watched where it is read
(`router/api/http.py`), and idle time between requests by uvicorn. Owns also how connections end when the
router stops: no request that is on its way is met by a closed connection. Knows nothing of what is asked.
"""

import asyncio
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LINGER_SECONDS = 1
"""A router that stops waits so long for a next request on an idle connection; the answer then says that it
is the last one. A client that is told sends its next request to another router."""


def protocol_with_deadline(head_seconds: float) -> type[asyncio.Protocol]:
    """Uvicorn's protocol, with a deadline for the head of each request and for the first one to begin."""

    class Protocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None
        _is_leaving = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start()

        def on_message_begin(self) -> None:
            self._start()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._stop()
            super().on_headers_complete()
            if self._is_leaving:
                self.cycle.keep_alive = False

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def shutdown(self) -> None:
            self._is_leaving = True
            self.timeout_keep_alive = LINGER_SECONDS
            if self.cycle is None or self.cycle.response_complete:
                self._unset_keepalive_if_required()
                self.timeout_keep_alive_task = self.loop.call_later(
                    LINGER_SECONDS, self.timeout_keep_alive_handler
                )
            elif not self.cycle.response_started:
                self.cycle.keep_alive = False

        def _start(self) -> None:
            self._stop()
            self._deadline = self.loop.call_later(head_seconds, self.transport.close)

        def _stop(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return cast(type[asyncio.Protocol], Protocol)
