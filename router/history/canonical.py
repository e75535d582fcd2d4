"""Canonical conversations: a key for each beginning of a conversation, equal when a client sends it back.

Owns which messages count as equal. Clients change an assistant's message when they send it back: surrounding
blanks, respelt arguments, no reasoning, other ids; none of that counts. Reasoning that they do send is
compared with the generated one, or its ending. In other messages role, name and text count. Tools and
template arguments count whole, ignoring the order of their keys.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NewType

import msgspec

ConversationKey = NewType("ConversationKey", bytes)
"""Names all messages up to one. It cannot be computed without the namespace's root."""

KEY_BYTES = 16
FIRST_KEY = ConversationKey(bytes(KEY_BYTES))

Digest = NewType("Digest", bytes)
"""Names one message, or all that comes before the first; the same in every namespace."""

Thought = NewType("Thought", bytes)
"""A digest of a message's reasoning and its last `ENDING_BYTES`, without blanks around it."""

ENDING_BYTES = 128
"""Shorter reasoning may be only the ending: openai-node's stream helper keeps the last piece of an unknown
field."""

Message = Mapping[str, Any]
"""A message in the form of chat templates; `content` is a text, none, or a list of parts."""

_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder().decode


def conversation_digests(
    tools: Sequence[Mapping[str, Any]] | None,
    template_arguments: Mapping[str, Any] | None,
    messages: Sequence[Message],
) -> list[Digest]:
    """Return the digest of all that comes before the messages, then one for each message. Raises
    RecursionError for JSON that is nested too deeply to encode."""
    head = (
        _digest(_written([tools or None, template_arguments or None]))
        if tools or template_arguments
        else _NO_HEAD
    )
    return [head, *[_digest(canonical(message)) for message in messages]]


def message_digest(message: Message) -> Digest:
    return _digest(canonical(message))


def thought_digest(reasoning: str) -> Thought:
    text = reasoning.strip().encode("utf-8", "surrogatepass")
    return Thought(hashlib.sha256(text).digest()[:KEY_BYTES] + text[-ENDING_BYTES:])


def is_thought(sent: Thought, generated: Thought) -> bool:
    """Whether the returned reasoning is all of the generated one."""
    return sent[:KEY_BYTES] == generated[:KEY_BYTES]


def is_ending(sent: Thought, generated: Thought) -> bool:
    """Whether it is the end of the generated one; only the last `ENDING_BYTES` are compared."""
    ending = sent[KEY_BYTES:]
    return 0 < len(ending) < ENDING_BYTES and generated.endswith(ending, KEY_BYTES)


def thoughts_of(messages: Sequence[Message]) -> dict[int, Thought]:
    """The reasoning of the answers that came back with some, by position."""
    return {
        position: thought_digest(reasoning)
        for position, message in enumerate(messages)
        if message.get("role") == "assistant"
        and isinstance(reasoning := message.get("reasoning_content"), str)
        and reasoning.strip()
    }


def conversation_keys(
    root: bytes,
    digests: Sequence[Digest],
    thoughts: Mapping[int, Thought] | None = None,
    is_other: Callable[[int, ConversationKey, Thought], bool] | None = None,
) -> list[ConversationKey]:
    """Return a rolling key per message. A message whose reasoning `is_other` than the generated one gets
    another key, and so does every later message."""
    key = _first_key(root, digests[0])
    keys: list[ConversationKey] = []
    for position, digest in enumerate(digests[1:]):
        before, key = key, key_after(root, key, digest)
        thought = thoughts.get(position) if thoughts else None
        if thought is not None and is_other is not None and is_other(position, key, thought):
            key = key_after(root, before, _digest(digest + thought))
        keys.append(key)
    return keys


@lru_cache(maxsize=256)
def _first_key(root: bytes, head: Digest) -> ConversationKey:
    """Return the key before all messages, cached: most conversations have no tools, and roots are few."""
    return key_after(root, FIRST_KEY, head)


def key_after(root: bytes, key: ConversationKey, digest: Digest) -> ConversationKey:
    """Return the key of the conversation that goes on with a message."""
    # Each of the three has one length.
    return ConversationKey(hashlib.sha256(root + key + digest).digest()[:KEY_BYTES])


def canonical(message: Message) -> bytes:
    """Return the same bytes for messages that count as the same."""
    role = message.get("role")
    text = _text(message.get("content"))
    if role != "assistant":
        return _written([role, message.get("name"), text])
    calls = message.get("tool_calls")
    if not calls and message.get("function_call"):
        calls = [{"function": message["function_call"]}]
    if not isinstance(calls, list):
        calls = []
    return _written([role, text.strip(), [_call(call) for call in calls]])


def _digest(data: bytes) -> Digest:
    """SHA-256, which takes half of BLAKE2b's time."""
    return Digest(hashlib.sha256(data).digest())


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    return _written(content).decode()


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else _written(part).decode()


def _call(call: Any) -> list[Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return [None, call]
    return [function.get("name"), _arguments(function.get("arguments"))]


def _arguments(arguments: Any) -> Any:
    """Parse the arguments; a text that is not JSON stays as it is."""
    if isinstance(arguments, str):
        source = arguments.strip()
        try:
            arguments = _decode(source) if source else None
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return source
    return {} if arguments is None else arguments


def _written(value: Any) -> bytes:
    """Encode as JSON with sorted keys."""
    try:
        return _encode(value)
    except (UnicodeEncodeError, OverflowError):  # half a surrogate pair; an integer beyond 64 bits
        return json.dumps(value, sort_keys=True).encode()


_NO_HEAD = _digest(_written([None, None]))
