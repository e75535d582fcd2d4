"""Bodies that cost a server the most for the bytes that they take, for every route that reads one.

Owns the corpus: each body by name, at whatever size is asked for.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, MESSAGE_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"

HI = b'{"role":"user","content":"hi"}'


@dataclass(frozen=True, slots=True)
class WorstBody:
    name: str
    route: str
    content: bytes


def worst_bodies(size: int, *, model: str = "toy") -> Iterator[WorstBody]:
    """Yield bodies of about `size` bytes each."""
    prefix = b'{"model":' + json.dumps(model).encode() + b',"max_tokens":1,'
    for route, shapes in SHAPES.items():
        for name, shape in shapes.items():
            yield WorstBody(name, route, prefix + shape(size) + b"}")
    for route in SHAPES:
        yield WorstBody("no JSON", route, b"\x00" * size)
        yield WorstBody("never closed", route, b'{"a":[' + b"1," * (size // 2))
        yield WorstBody("invalid UTF-8 at the end", route, prefix + b'"prompt":"' + b"a" * size + b'\xff"}')
        yield WorstBody("duplicate keys", route, prefix + b'"stop":null,' * (size // 12) + b'"seed":1}')
        yield WorstBody("white space", route, prefix + b" " * size + b'"seed":1}')
        yield WorstBody("a huge number", route, prefix + b'"seed":' + b"9" * size + b"}")


BodyShape = Callable[[int], bytes]
"""Size → fields of an object, as JSON."""


def _list_of(item: bytes, size: int) -> bytes:
    return b"[" + b",".join([item] * (size // (len(item) + 1))) + b"]"


def _repeated(text: bytes, size: int) -> bytes:
    return text * (size // len(text))


def _nested(depth: int, size: int) -> bytes:
    return _list_of(b"[" * depth + b"]" * depth, size)


def _message(content: Callable[[int], bytes]) -> BodyShape:
    return lambda size: b'"messages":[{"role":"user","content":"' + content(size) + b'"}]'


def _beside(name: bytes, value: Callable[[int], bytes]) -> BodyShape:
    """Return a message that is harmless, and a field that is not."""
    return lambda size: b'"messages":[' + HI + b'],"' + name + b'":' + value(size)


def _tools(parameters: Callable[[int], bytes]) -> BodyShape:
    return _beside(
        b"tools",
        lambda size: (
            b'[{"type":"function","function":{"name":"<|im_end|>","parameters":{"a":'
            + parameters(size)
            + b"}}}]"
        ),
    )


def _schemas(value: Callable[[int], bytes]) -> BodyShape:
    return _beside(
        b"tools", lambda size: b'[{"name":"f","input_schema":{"<|im_end|>":' + value(size) + b"}}]"
    )


def _blocks(block: bytes) -> BodyShape:
    return lambda size: b'"messages":[{"role":"user","content":' + _list_of(block, size) + b"}]"


def _prompt(value: Callable[[int], bytes]) -> BodyShape:
    return lambda size: b'"prompt":' + value(size)


def _input(value: Callable[[int], bytes]) -> BodyShape:
    return lambda size: b'"input":' + value(size)


def _with_input(name: bytes, value: Callable[[int], bytes]) -> BodyShape:
    return lambda size: b'"input":"hi","' + name + b'":' + value(size)


def _text(piece: bytes) -> Callable[[int], bytes]:
    return lambda size: _repeated(piece, size)


def _quoted(piece: bytes) -> Callable[[int], bytes]:
    return lambda size: b'"' + _repeated(piece, size) + b'"'


TEXTS: Mapping[str, bytes] = {
    "one letter": b"a",
    "words": b"cache block prefix ",
    "beginnings of special tokens": b"<|",
    "special tokens": b"<|im_end|>",
    "escapes": rb"\u00e9",
    "surrogate pairs": rb"\ud83d\ude00",
    "quotes": rb"\"",
    "backslashes": rb"\\",
    "marks": "\ufdd0".encode(),
    "spaces": b" ",
    "new lines": rb"\n",
    "digits": b"0123456789",
    "commas": b",",
}

VALUES: Mapping[str, Callable[[int], bytes]] = {
    "empty lists": lambda size: _list_of(b"[]", size),
    "lists 400 deep": lambda size: _nested(400, size),
    "lists without end": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "objects": lambda size: _list_of(b'{"a":1}', size),
    "numbers": lambda size: _list_of(b"1", size),
    "floats": lambda size: _list_of(b"1e300", size),
    "empty strings": lambda size: _list_of(b'""', size),
    "one object of many keys": lambda size: (
        b"{" + b",".join(b'"%d":1' % number for number in range(size // 12)) + b"}"
    ),
}

_SOME_TEXTS = ("words", "special tokens", "surrogate pairs")

SHAPES: Mapping[str, Mapping[str, BodyShape]] = {
    CHAT: {
        **{f"text: {name}": _message(_text(piece)) for name, piece in TEXTS.items()},
        **{f"tools: {name}": _tools(value) for name, value in VALUES.items()},
        **{f"unknown field: {name}": _beside(b"metadata", value) for name, value in VALUES.items()},
        "kwargs: empty lists": _beside(
            b"chat_template_kwargs", lambda size: b'{"a":' + _list_of(b"[]", size) + b"}"
        ),
        "messages: empty lists": lambda size: b'"messages":' + _list_of(b"[]", size),
        "many messages": lambda size: b'"messages":' + _list_of(HI, size),
        "many parts": lambda size: (
            b'"messages":[{"role":"user","content":' + _list_of(b'{"type":"text","text":"a"}', size) + b"}]"
        ),
        "many tools": _beside(
            b"tools", lambda size: _list_of(b'{"type":"function","function":{"name":"f"}}', size)
        ),
        "arguments in a string": lambda size: (
            b'"messages":['
            + HI
            + b',{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\":'
            + _list_of(b"[]", size)
            + b'}"}}]}]'
        ),
        "many stop strings": _beside(b"stop", lambda size: _list_of(b'"a"', size)),
        "a long stop string": _beside(b"stop", _quoted(b"a")),
        "many biases": _beside(b"logit_bias", VALUES["one object of many keys"]),
        "many stop tokens": _beside(b"stop_token_ids", lambda size: _list_of(b"1", size)),
        "a long user": _beside(b"user", _quoted(b"a")),
        "a long key": _beside(b"prompt_cache_key", _quoted(b"a")),
    },
    COMPLETIONS: {
        **{f"text: {name}": _prompt(_quoted(piece)) for name, piece in TEXTS.items()},
        **{f"prompt: {name}": _prompt(value) for name, value in VALUES.items()},
        "many texts": _prompt(lambda size: _list_of(b'"hello"', size)),
        "128 lists of ids": _prompt(lambda size: _list_of(_list_of(b"300", size // 128 - 4), size)),
    },
    RESPONSES: {
        **{f"text: {name}": _input(_quoted(piece)) for name, piece in TEXTS.items()},
        **{f"items: {name}": _input(value) for name, value in VALUES.items()},
        **{f"metadata: {name}": _with_input(b"metadata", value) for name, value in VALUES.items()},
        **{f"tools: {name}": _with_input(b"tools", value) for name, value in VALUES.items()},
        "many items": _input(lambda size: _list_of(HI, size)),
        "many calls": _input(
            lambda size: _list_of(b'{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}', size)
        ),
        "many references": _input(lambda size: _list_of(b'{"type":"item_reference","id":"msg_1"}', size)),
        "much reasoning": _input(lambda size: _list_of(b'{"type":"reasoning","summary":[]}', size)),
        "many spaces of tools": _with_input(
            b"tools", lambda size: _list_of(b'{"type":"namespace","name":"n","tools":[]}', size)
        ),
        "many tools": _with_input(b"tools", lambda size: _list_of(b'{"type":"function","name":"f"}', size)),
        "a large tool": _with_input(
            b"tools",
            lambda size: (
                b'[{"type":"function","name":"f","parameters":{"a":' + _list_of(b"[]", size) + b"}}]"
            ),
        ),
        "long instructions": _with_input(b"instructions", _quoted(b"a")),
    },
    MESSAGES: {  # what is done with texts and schemas is the same as in a chat
        **{f"text: {name}": _message(_text(TEXTS[name])) for name in _SOME_TEXTS},
        "system": _beside(b"system", _quoted(b"cache block prefix ")),
        "tools: lists 400 deep": _schemas(VALUES["lists 400 deep"]),
        "unknown field: objects": _beside(b"metadata", VALUES["objects"]),
        "many messages": lambda size: b'"messages":' + _list_of(HI, size),
        "many turns": lambda size: (
            b'"messages":' + _list_of(HI + b',{"role":"assistant","content":"hi"}', size)
        ),
        "many blocks": _blocks(b'{"type":"text","text":"a"}'),
        "many marks": _blocks(b'{"type":"text","text":"a","cache_control":{"type":"ephemeral"}}'),
        "many results of nothing": _blocks(b'{"type":"tool_result","tool_use_id":"a"}'),
        "documents": _blocks(b'{"type":"document","source":{"type":"text","data":"a"}}'),
        "many calls": lambda size: (
            b'"messages":['
            + HI
            + b',{"role":"assistant","content":['
            + b",".join(
                b'{"type":"tool_use","id":"%d","name":"f","input":{}}' % number
                for number in range(size // 50)
            )
            + b"]}]"
        ),
        "many system blocks": _beside(b"system", lambda size: _list_of(b'{"type":"text","text":"a"}', size)),
        "many tools": _beside(b"tools", lambda size: _list_of(b'{"name":"f","input_schema":{}}', size)),
        "many tools of others": _beside(b"tools", lambda size: _list_of(b'{"type":"bash"}', size)),
        "many stop sequences": _beside(b"stop_sequences", lambda size: _list_of(b'"a"', size)),
        "a long stop sequence": _beside(b"stop_sequences", lambda size: b"[" + _quoted(b"a")(size) + b"]"),
        "a long user": _beside(b"metadata", lambda size: b'{"user_id":' + _quoted(b"a")(size) + b"}"),
    },
    MESSAGE_TOKENS: {
        **{f"text: {name}": _message(_text(TEXTS[name])) for name in _SOME_TEXTS},
        "tools: lists 400 deep": _schemas(VALUES["lists 400 deep"]),
    },
    TOKENIZE: {
        **{f"text: {name}": _prompt(_quoted(piece)) for name, piece in TEXTS.items()},
        **{f"messages, text: {name}": _message(_text(piece)) for name, piece in TEXTS.items()},
        **{f"messages, tools: {name}": _tools(value) for name, value in VALUES.items()},
    },
    DETOKENIZE: {
        "ids": lambda size: b'"tokens":' + _list_of(b"300", size),
        "small ids": lambda size: b'"tokens":' + _list_of(b"1", size),
        "huge ids": lambda size: b'"tokens":' + _list_of(b"9" * 200, size),
        "empty lists": lambda size: b'"tokens":' + _list_of(b"[]", size),
    },
}
