"""A server with routes beside those that generate: embeddings, a reranker, and speech both ways."""

import asyncio
import email
import email.policy
import json
from collections.abc import AsyncIterator
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.replicas.openai_engine.text_server import TextServer

SOUND = bytes(range(256)) * 64
ROUTES = ("/v1/embeddings", "/rerank", "/v1/audio/speech", "/v1/audio/transcriptions")


class Came(NamedTuple):
    path: str
    content_type: str
    body: bytes


class RouteServer(TextServer):
    """It has no chats. `num_open` counts the requests that are in work."""

    def __init__(self, served_name: str = "vectors") -> None:
        self.came: list[Came] = []
        super().__init__()
        self.served_name = served_name

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._models),
            Route("/v1/embeddings", self._embeddings, methods=["POST"]),
            Route("/rerank", self._rerank, methods=["POST"]),
            Route("/v1/audio/speech", self._speech, methods=["POST"]),
            Route("/v1/audio/transcriptions", self._transcription, methods=["POST"]),
        ]

    async def _embeddings(self, request: Request) -> Response:
        body = await self._take(request)
        match self.fault:
            case "hangs":
                self.num_open += 1
                try:
                    await request.receive()  # nothing comes but the client's leaving
                finally:
                    self.num_open -= 1
            case "refuses":
                return JSONResponse({"error": {"message": "too long", "type": "theirs", "code": 400}}, 400)
            case "is full":
                return JSONResponse({"error": {"message": "no slot is free"}}, 503)
            case "breaks off" | "breaks off later":
                return StreamingResponse(_breaking(is_later=self.fault == "breaks off later"))
        asked = json.loads(body)
        if asked["model"] != self.served_name:
            return JSONResponse({"error": {"message": "no such model"}}, 404)
        texts = asked["input"] if isinstance(asked["input"], list) else [asked["input"]]
        data = [{"object": "embedding", "index": at, "embedding": [0.5, at]} for at in range(len(texts))]
        usage = {"prompt_tokens": 7 * len(texts), "total_tokens": 7 * len(texts)}
        return JSONResponse({"object": "list", "model": self.served_name, "data": data, "usage": usage})

    async def _rerank(self, request: Request) -> Response:
        documents = json.loads(await self._take(request))["documents"]
        results = [{"index": at, "relevance_score": 0.5} for at in range(len(documents))]
        return JSONResponse({"usage": {"total_tokens": 5}, "results": results})

    async def _speech(self, request: Request) -> Response:
        await self._take(request)
        return Response(SOUND, media_type="audio/mpeg")

    async def _transcription(self, request: Request) -> Response:
        head = f"content-type: {request.headers['content-type']}\r\n\r\n".encode()
        form = email.message_from_bytes(head + await self._take(request), policy=email.policy.HTTP)
        parts = {part.get_param("name", header="content-disposition"): part for part in form.iter_parts()}
        model, sound = parts["model"].get_content().strip(), parts["file"]
        num_bytes = len(sound.get_payload(decode=True))
        return JSONResponse({"text": f"{model}: {num_bytes} bytes of {sound.get_filename()}"})

    async def _take(self, request: Request) -> bytes:
        body = await request.body()
        self.came.append(Came(request.url.path, request.headers["content-type"], body))
        return body


async def _breaking(*, is_later: bool) -> AsyncIterator[bytes]:
    if is_later:
        yield b'{"object": "list", '
        await asyncio.sleep(0.3)
    raise ConnectionError("on purpose")
