"""POST /v1/messages/count_tokens: the route.

Owns the route. The answer is written in `counts.py`, here or where large bodies are prepared.
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.anthropic.counts import count_message_tokens
from router.api.context import ApiContext
from router.api.written_answers import written_answer


class AnthropicRoutes:
    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[Route]:
        return [Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"])]

    async def count_tokens(self, request: Request) -> Response:
        context = self._context
        async with context.body(request.scope, request.receive) as body:
            written = await written_answer(context, request, "message_count", body, count_message_tokens)
        return Response(written, media_type="application/json")
