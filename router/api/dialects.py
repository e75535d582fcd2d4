"""DIALECTS: what differs between the APIs, a record each.

Owns which path speaks which dialect, and where each one's readers, writers, errors and keys are. The rest of
`router/api/` outside the dialects' packages knows them by these records alone.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from starlette.types import Scope

from router.api.anthropic.body import MESSAGE, read_message
from router.api.anthropic.counts import count_message_tokens
from router.api.anthropic.errors import ANTHROPIC_ERRORS
from router.api.anthropic.messages import MessageWriter
from router.api.api_request import AnswerWriter, Prompt
from router.api.chat_request import ChatRequest
from router.api.context import ApiContext
from router.api.error_shapes import OPENAI_ERRORS, ErrorShape
from router.api.field_table import FieldTable
from router.api.gemini.answers import GeminiWriter
from router.api.gemini.body import read_gemini
from router.api.gemini.count import count_tokens
from router.api.gemini.errors import GEMINI_ERRORS
from router.api.gemini.paths import GENERATE_CONTENT, speaks_gemini
from router.api.openai.chat import ChatWriter
from router.api.openai.chat_body import CHAT, read_chat
from router.api.openai.token_counts import detokenize, tokenize
from router.api.responses.answers import ResponseWriter
from router.api.responses.body import read_response
from router.prompt.catalog import ServedModel

NewWriter = Callable[[ApiContext, ChatRequest, ServedModel, Prompt], AnswerWriter]


class Dialect(NamedTuple):
    """`read` gets a body and the most choices allowed. `sent_fields` are those that a server of bodies can be
    sent, if there is one of this dialect."""

    path: str
    read: Callable[[bytes, int], ChatRequest]
    new_writer: NewWriter
    sent_fields: FieldTable[Any] | None = None


DIALECTS: Mapping[str, Dialect] = {
    "chat": Dialect("/v1/chat/completions", read_chat, ChatWriter, CHAT),
    "gemini": Dialect(GENERATE_CONTENT, read_gemini, GeminiWriter),
    "messages": Dialect("/v1/messages", read_message, MessageWriter, MESSAGE),
    "responses": Dialect("/v1/responses", read_response, ResponseWriter),
}
"""By the kind of body. Plain completions are no chats, and have steps of their own."""

COUNTS: Mapping[str, Callable[..., bytes]] = {
    "tokenize": tokenize,
    "detokenize": detokenize,
    "gemini_count": count_tokens,
    "message_count": count_message_tokens,
}
"""Bodies of which only the prompt's tokens are asked."""


class Vendor(NamedTuple):
    """`key_headers` are those that its clients send keys in, and `key_words` tell that to people."""

    errors: ErrorShape
    key_headers: tuple[bytes, ...]
    key_words: str


OPENAI = Vendor(OPENAI_ERRORS, (b"authorization",), "'Authorization: Bearer KEY'")
ANTHROPIC = Vendor(
    ANTHROPIC_ERRORS, (b"x-api-key", b"authorization"), "'x-api-key: KEY' or 'Authorization: Bearer KEY'"
)
GEMINI = Vendor(
    GEMINI_ERRORS,
    (b"x-goog-api-key", b"authorization"),
    "'x-goog-api-key: KEY' or 'Authorization: Bearer KEY'",
)

_MESSAGES, _MODELS = "/v1/messages", "/v1/models"


def vendor_of(scope: Scope) -> Vendor:
    """Return whose words a request's answer is in: by its path, and by headers where several share one.
    OpenAI's serve every route that is no dialect's."""
    path: str = scope["path"]
    if path == _MESSAGES or path.startswith(_MESSAGES + "/"):
        return ANTHROPIC
    if path.startswith(_MODELS) and any(name == b"anthropic-version" for name, _ in scope["headers"]):
        return ANTHROPIC
    return GEMINI if speaks_gemini(scope) else OPENAI
