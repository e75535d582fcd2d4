"""An API server of Kubernetes' as far as finders ask it: lists and watches over TLS, and their faults."""

import asyncio
import gzip
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.certificates import Authority

SLICES = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
PODS = "/api/v1/namespaces/llm/pods"
POOL = "/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools/qwen"


class KubernetesApi:
    """`objects` has the answer of each path. A watch ends by `say`; `fault` is how lists and watches fail."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.version = 7
        self.fault = ""
        self.token = "first"
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.watches: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    def list_of(self, *items: Any) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": str(self.version)}, "items": list(items)}

    @property
    def num_lists(self) -> int:
        return sum("watch" not in query for _, query in self.asked)

    async def say(self, *events: Any) -> None:
        """Send the next watch these events, in chunks that end anywhere, and let it go on."""
        writer = await asyncio.wait_for(self.watches.get(), 20)
        text = "".join(
            event if isinstance(event, str) else f"{json.dumps(event)}\n" for event in events
        ).encode()
        for start in range(0, len(text), 7):
            piece = text[start : start + 7]
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if not await self._answer(head, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> bool:
        url = urlsplit(head.split()[1])
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.asked.append((url.path, query))
        if f"authorization: Bearer {self.token}\r\n" not in head:
            return self._whole(writer, 401, {"message": "Unauthorized"})
        match self.fault:
            case "closes":
                return False
            case "hangs":
                await asyncio.sleep(60)
            case "drips":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n")
                while True:
                    writer.write(b" ")
                    await asyncio.sleep(0.01)
            case "forbids":
                return self._whole(writer, 403, {"message": "endpointslices is forbidden"})
            case "fails":
                return self._whole(writer, 500, "<html>")
            case "nonsense":
                return self._whole(writer, 200, [{"items": 7}])
            case "endless":
                return self._whole(writer, 200, "x" * 5000)
            case "compresses":
                body = gzip.compress(json.dumps(self.objects).encode())
                head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                return True
            case "gone" if "watch" in query:
                return self._whole(writer, 410, {"message": "too old resource version"})
        if "watch" not in query:
            found = self.objects.get(url.path)
            return self._whole(writer, 404 if found is None else 200, found or {"message": "not found"})
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await writer.drain()
        await self.watches.put(writer)
        return True

    def _whole(self, writer: asyncio.StreamWriter, status: int, answer: Any) -> bool:
        body = json.dumps(answer).encode()
        writer.write(f"HTTP/1.1 {status} Whatever\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        return True


@asynccontextmanager
async def kubernetes_api(folder: Path) -> AsyncIterator[tuple[KubernetesApi, str, Path]]:
    """Yield the server, its address, and a pod's account there."""
    authority = Authority(folder, "ca")
    pair = authority.replica("localhost")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    api = KubernetesApi()
    server = await asyncio.start_server(api.serve, "localhost", 0, ssl=context)
    (folder / "token").write_text("first\n")
    (folder / "namespace").write_text("llm")
    port = server.sockets[0].getsockname()[1]
    try:
        yield api, f"localhost:{port}", folder
    finally:
        server.close()
