"""Server: HTTP with one server, from a thread of its own.

Owns the connections. Requests stream in tasks of the thread's event loop; what comes is handed to `tell`, in
that thread. Redirects are never followed, the environment's proxies are not used, and compressed answers are
none: nothing asks for them, and a few bytes may become gigabytes.
"""

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from io import BytesIO
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import httpx
import msgspec
import uvloop

from replicas.config import ReplicaConfig
from replicas.errors import EngineDied, StartupError
from replicas.process.settings import SettingsError
from replicas.protocol.frames import MAX_ERROR_BYTES, BodyForm, Refusal, RefusalCode
from replicas.remote_engine.dialect import Chunk, Dialect, NotThere, Reader
from replicas.remote_engine.facts import ServerLoad, ServerModel
from replicas.remote_engine.model_list import MODELS_PATH, read_models
from replicas.remote_engine.nixl import SecondPart
from replicas.remote_engine.refusals import in_one_line, parsed, refusal_of, words_of

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Time between looks at the server's load."""
LIST_SECONDS = 2.0
"""Time between looks at its list of models."""

CONNECT_SECONDS = 5.0
IDLE_SECONDS = 4.0
"""How long an unused connection is kept: less than uvicorn's five seconds, so that none closes under a
request."""
ANSWER_SECONDS = 30.0
MOST_ANSWER_BYTES = 16 * 2**20
"""Longest answer that is no model's."""
ERROR_SECONDS = 5.0
LEAST_OF_KEY = 4
"""Characters of a key at the end of an answer that are taken for its beginning."""

KEY_STATUSES = (401, 403)
KEY_ADVICE = "it wants an API key, or another one: give --join-key-file FILE, in a fleet file engine_key_file"

EVENT_STREAM = "text/event-stream"
JSON = "application/json"

HTTP_ERRORS = (aiohttp.ClientError, TimeoutError, OSError)


class Sent(NamedTuple):
    """A request; `read` gets each event of its answer, which has at most `most_bytes`. There are at most
    `most_events`. An answer that `is_whole` does not stream, and is one event. The fields of a `second_part`
    are added when it is sent."""

    body: Mapping[str, Any]
    read: Reader
    most_bytes: int
    most_events: int
    is_whole: bool = False
    second_part: SecondPart | None = None


class Piece(NamedTuple):
    """`at` is when it came, by the monotonic clock."""

    name: str
    chunk: Chunk
    at: float


class Answer(NamedTuple):
    """`location` is where it redirects to."""

    status_code: int
    content: bytes
    location: str | None

    @property
    def has_redirect_location(self) -> bool:
        return self.status_code // 100 == 3 and self.location is not None


class Ended(NamedTuple):
    """A stream is over; `refusal` if not by its own end."""

    name: str
    refusal: Refusal | None = None


class Looked(NamedTuple):
    load: ServerLoad


class Listed(NamedTuple):
    """The server has its model still, with these names and adapters."""

    model: ServerModel


class Unreachable(NamedTuple):
    """The server does not answer; `is_refused` if its address refuses connections."""

    reason: str
    is_refused: bool


class Watched:
    """A server that is looked at: it hangs after `hang_seconds` without an answer."""

    def __init__(self, hang_seconds: float) -> None:
        self._hang_seconds = hang_seconds
        self._seen_at = time.monotonic()

    def seen(self) -> None:
        self._seen_at = time.monotonic()

    def missed(self, news: Unreachable) -> None:
        """Raises EngineDied once it is gone, or hangs."""
        if news.is_refused:
            raise EngineDied(f"the server is gone: {news.reason}")
        if time.monotonic() - self._seen_at > self._hang_seconds:
            raise EngineDied(f"the server has not answered for {self._hang_seconds:g} s: {news.reason}")


Tell = Callable[[Any], None]
"""Takes what comes: Piece, Ended, Looked, Listed or Unreachable."""


class Server:
    """`key` goes with every request. `rank`, if it was chosen, is named as vLLM reads it."""

    def __init__(self, url: str, *, key: str | None, rank: int | None, tell: Tell) -> None:
        self.url = url.rstrip("/")
        headers = {"accept-encoding": "identity"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        if rank is not None:
            headers["x-data-parallel-rank"] = str(rank)
        self._key = key
        self._headers = headers
        self._tell = tell
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = uvloop.new_event_loop()
        self._http, self._looks = (self._loop.run_until_complete(self._connect()) for _ in range(2))
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    # Before it runs: one question after the other.

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """GET, or POST with a body. Raises StartupError for anything but an answer."""
        answer = self.try_ask(path, body)
        if answer.status_code != 200:
            kind = NotThere if answer.status_code == 404 else StartupError
            words = words_of(self._without_key(answer.content))
            raise kind(
                f"{self.url}{path} answers {answer.status_code}: {words}"
                + (f" (to {in_one_line(answer.location or '')})" if answer.has_redirect_location else "")
                + (f": {KEY_ADVICE}" if answer.status_code in KEY_STATUSES else "")
            )
        return answer.content

    def try_ask(self, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Return whatever is answered. Raises StartupError if nothing is."""
        content = None if body is None else msgspec.json.encode(body)
        try:
            return self._loop.run_until_complete(self._whole(path, ANSWER_SECONDS, content))
        except (*HTTP_ERRORS, ValueError) as error:
            raise StartupError(f"{self.url} does not answer: {self._named(error)}") from error

    def wait(self, deadline: float, path: str = "/health") -> None:
        """Return when the server answers. Raises StartupError at the deadline of the monotonic clock."""
        has_said = False
        while True:
            try:
                self.ask(path)
                return
            except StartupError as error:
                if time.monotonic() > deadline:
                    raise
                if not has_said:
                    logger.info("waits for the server: %s", error)
                    has_said = True
            time.sleep(LOOK_SECONDS)

    # From then on.

    def speak(self, dialect: Dialect) -> None:
        self._dialect = dialect

    def start(self) -> None:
        self._thread.start()

    def submit(self, name: str, sent: Any) -> None:
        self._loop.call_soon_threadsafe(self._begin, name, sent)

    def abort(self, name: str) -> None:
        """Close its connection, by which the server ends it; nothing follows but what is on its way."""
        self._loop.call_soon_threadsafe(self._cancel, name)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        elif not self._loop.is_closed():
            self._loop.run_until_complete(self._disconnect())
            self._loop.close()

    async def _connect(self) -> aiohttp.ClientSession:
        # With the CAs of SSL_CERT_FILE.
        ssl_context = httpx.create_ssl_context() if self.url.startswith("https") else True
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS, ssl=ssl_context),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )

    async def _disconnect(self) -> None:
        await self._http.close()
        await self._looks.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        looks = [self._loop.create_task(each) for each in self._looking()]
        try:
            self._loop.run_forever()
        finally:
            tasks = [*looks, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._disconnect())
            self._loop.close()

    def _begin(self, name: str, sent: Any) -> None:
        task = self._tasks[name] = self._loop.create_task(self._stream(name, sent))
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    def _cancel(self, name: str) -> None:
        task = self._tasks.get(name)
        if task is not None:
            task.cancel()

    async def _get(self, path: str) -> bytes:
        return (await self._whole(path, CONNECT_SECONDS)).content

    async def _whole(self, path: str, seconds: float, body: bytes | None = None) -> Answer:
        """GET over a connection of its own, since a server with a thread for each may have none to spare; or
        POST a body. Raises one of HTTP_ERRORS, and ValueError for a longer or compressed answer."""
        url = self.url + path
        async with asyncio.timeout(seconds):
            asked = self._looks.get(url, allow_redirects=False) if body is None else self._post(path, body)
            async with asked as answer:
                check_plain(answer.headers)
                content = await read_whole(answer.content.iter_any(), MOST_ANSWER_BYTES)
                return Answer(answer.status, content, answer.headers.get("location"))

    def _post(
        self, path: str, content: bytes, content_type: str = "application/json"
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers = {"content-type": content_type}
        return self._http.post(self.url + path, data=BytesIO(content), headers=headers, allow_redirects=False)

    def _looking(self) -> list[Coroutine[None, None, None]]:
        return [self._look(), self._list()]

    async def _list(self) -> None:
        """Follow the names that the server has. Whether it answers at all is seen by its load."""
        while True:
            await asyncio.sleep(LIST_SECONDS)
            try:
                answer = await self._whole(MODELS_PATH, CONNECT_SECONDS)
                if answer.status_code == 200:
                    self._tell(Listed(read_models(answer.content, self._dialect.model.served_name)))
            except NotThere as error:
                self._tell(Unreachable(str(error), is_refused=True))
            except (*HTTP_ERRORS, StartupError, ValueError) as error:
                logger.debug("the last list of models holds: %s", self._named(error))

    async def _look(self) -> None:
        paths = self._dialect.look_paths
        while True:
            try:
                self._tell(Looked(self._dialect.load([await self._get(path) for path in paths])))
            except Exception as error:  # of any kind: it is told, and the next look follows
                self._tell(self._unreachable(error))
            await asyncio.sleep(LOOK_SECONDS)

    async def _stream(self, name: str, sent: Any) -> None:
        """`sent` is a Sent; a subclass may have its own."""
        refusal: Refusal | None = None
        body = sent.body
        if sent.second_part is not None:
            body = {**body, **sent.second_part.fields()}
        content = msgspec.json.encode(body)
        try:
            async with self._post(self._dialect.generate_path, content) as answer:
                kind = answer.headers.get("content-type", "").lower()
                if answer.status != 200 or not kind.startswith(JSON if sent.is_whole else EVENT_STREAM):
                    refusal = await self._refusal(answer)
                else:
                    check_plain(answer.headers)
                    events = _whole_answer if sent.is_whole else _events
                    async for event in events(answer.content.iter_any(), sent):
                        chunk = sent.read(event)
                        if chunk.refusal is not None:
                            chunk = sent.read(self._without_key(event))
                        self._tell(Piece(name, chunk, time.monotonic()))
        except asyncio.CancelledError:
            return
        except Exception as error:  # of any kind: it ends this request and no other
            refusal = self._breaks_off(error)
        self._tell(Ended(name, refusal))

    def _breaks_off(self, error: Exception) -> Refusal:
        return Refusal(RefusalCode.INTERNAL, f"the server's answer breaks off: {self._named(error)}")

    def _named(self, error: Exception) -> str:
        """Name an error, which may quote the server, and that the key."""
        return in_one_line(self._without_key(named(error).encode(errors="replace")).decode(errors="replace"))

    def _unreachable(self, error: Exception) -> Unreachable:
        """A name without an address says nothing of the server."""
        is_nameless = isinstance(error, aiohttp.ClientConnectorDNSError)
        is_refused = isinstance(error, aiohttp.ClientConnectorError) and not is_nameless
        return Unreachable(self._named(error), is_refused)

    async def _refusal(self, answer: aiohttp.ClientResponse, form: BodyForm | None = None) -> Refusal:
        """Read an error, or an answer of another kind than was asked for. Raises ValueError for a compressed
        one."""
        check_plain(answer.headers)
        content = b""
        with suppress(*HTTP_ERRORS):
            async with asyncio.timeout(ERROR_SECONDS):
                async for piece in answer.content.iter_any():
                    content += piece
                    if len(content) > MAX_ERROR_BYTES:
                        break
        return refusal_of(self._without_key(content), answer.status, answer.headers.get("retry-after"), form)

    def _without_key(self, content: bytes) -> bytes:
        """A server may say with which key it was asked, and its answer may end in the middle of that."""
        if self._key is None:
            return content
        said = parsed(content)
        if said is not None:  # so that there is one way to write the key
            content = json.dumps(said).encode()
        for written in (json.dumps(self._key)[1:-1].encode(), self._key.encode()):
            content = content.replace(written, b"***")
            cut = next((end for end in range(len(written), 0, -1) if content.endswith(written[:end])), 0)
            if cut >= LEAST_OF_KEY:
                content = content[:-cut] + b"***"
        return content


async def read_whole(pieces: AsyncIterator[bytes], most_bytes: int) -> bytes:
    """Raises ValueError if it is longer, and what the pieces raise."""
    content = bytearray()
    async for piece in pieces:
        content += piece
        if len(content) > most_bytes:
            raise ValueError(f"it answers more than {most_bytes} bytes")
    return bytes(content)


def check_plain(headers: Mapping[str, str]) -> None:
    """Raises ValueError for a compressed answer."""
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ValueError(f"it is compressed: {encoding[:20]}")


def named(error: Exception) -> str:
    """Without what was sent, which `repr` of aiohttp's errors has: the server's key among it."""
    cause = getattr(error, "os_error", error)  # why there is no connection, in the system's words
    return f"{type(cause).__name__}: {cause}"


async def _whole_answer(pieces: AsyncIterator[bytes], sent: Sent) -> AsyncIterator[bytes]:
    """Yield it as one event. Raises ValueError for a longer one."""
    yield await read_whole(pieces, sent.most_bytes)


async def _events(pieces: AsyncIterator[bytes], sent: Sent) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event but the last, `[DONE]`. Raises ValueError for a longer one,
    for too many, and for too much between them."""
    buffered, num_events, num_other_bytes = b"", 0, 0
    async for piece in pieces:
        *lines, buffered = (buffered + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                num_events += 1
                if num_events > sent.most_events:
                    raise ValueError(f"more than {sent.most_events} events")
                yield line[6:]
            else:
                num_other_bytes += len(line) + 1
        if len(buffered) > sent.most_bytes:
            raise ValueError(f"an event of more than {sent.most_bytes} bytes")
        if num_other_bytes > MOST_ANSWER_BYTES:
            raise ValueError(f"more than {MOST_ANSWER_BYTES} bytes that are no events")


def endpoint_of(url: str, config: ReplicaConfig, model: ServerModel) -> str:
    """Return the host:port by which a gateway reaches the server; empty, with a line in the log, if none
    can. Raises StartupError."""
    if config.model_name not in (None, model.served_name):
        logger.warning(
            "gateways cannot send requests to the server: it has the model as %s, and clients ask for %s",
            *(model.served_name, config.model_name),
        )
        return ""
    endpoint = address_of(url, config.engine_endpoint)
    if not endpoint:
        logger.info(
            "gateways cannot send requests to the server: %s is on loopback or has a path, and"
            " engine_endpoint names no other address",
            url,
        )
    return endpoint


def address_of(url: str, configured: str | None) -> str:
    """Return the host:port by which a gateway reaches the server. Unless it is configured, it is empty for a
    server on loopback or below a path, which gateways do not add. A name is resolved, since gateways take
    addresses. Raises StartupError."""
    if configured is not None:
        return configured
    split = urlsplit(url)
    if split.path.strip("/"):
        return ""
    port = split.port or (443 if split.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(split.hostname, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise StartupError(f"{split.hostname} cannot be resolved: {error}") from error
    if ip_address(found).is_loopback:
        return ""
    return f"[{found}]:{port}" if ":" in str(found) else f"{found}:{port}"


def read_key(file: str | None) -> str | None:
    """Read a server's API key; None without a file. Raises SettingsError."""
    if file is None:
        return None
    try:
        key = Path(file).expanduser().read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise SettingsError(f"setting engine_key_file: {file} cannot be read: {error}") from error
    if not key or not key.isprintable():
        raise SettingsError(f"setting engine_key_file: {file} holds no key")
    return key
