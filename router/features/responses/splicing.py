"""Replaces references to stored responses in a body by their items.

Owns the fields `previous_response_id` and `input`, and references to items. Bodies stay JSON and their
content is not decoded, so large ones cost no more than small ones. Pure.
"""

import re
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Raw, Struct

from router.api.json_body import both_lists, check_together, decode_body, with_fields
from router.errors import InvalidRequest
from router.features.responses.record import ID_PREFIX, StoredResponse

_PREVIOUS, _REFERENCE = b'"previous_response_id"', b'"item_reference"'
_ABSENT = (b"", b"null")
_POSITION = re.compile(r"\binput\[(\d+)\]")
MAX_REFERENCE_BYTES = 1024
MAX_REFERENCED = 32
"""Responses that the items of one request may be of."""


class Sent(Struct):
    """The fields of a body that matter here."""

    model: str = ""
    previous_response_id: str | None = None
    input: Raw = Raw(b"")


class _StoredItem(Struct):
    type: str = ""
    id: str = ""


class _StoredAnswer(Struct):
    output: Raw = Raw(b"[]")


_answer_decoder = msgspec.json.Decoder(_StoredAnswer)
_sent_decoder = msgspec.json.Decoder(Sent)
_list_decoder = msgspec.json.Decoder(list[Raw])
_item_decoder = msgspec.json.Decoder(_StoredItem)


def may_go_on(body: bytes) -> bool:
    """False for nearly all."""
    return _PREVIOUS in body or _REFERENCE in body


def sent_in(body: bytes) -> Sent:
    """Raises InvalidRequest."""
    return decode_body(_sent_decoder, body)


def items_of(sent: bytes) -> bytes | None:
    """Return an input as a list of items in JSON; None for what is no input."""
    sent = sent.strip()
    if sent in _ABSENT:
        return b"[]"
    if sent[:1] == b'"':
        return b'[{"type":"message","role":"user","content":' + sent + b"}]"
    return sent if sent[:1] == b"[" else None


def referred_items(items: bytes, *, is_light: bool) -> dict[int, str]:
    """Return the ids of items that are only named, by their positions; in a body that is light, since it is
    looked through. Raises InvalidRequest."""
    if _REFERENCE not in items or not is_light:
        return {}
    found: dict[int, str] = {}
    for position, raw in enumerate(_list_decoder.decode(items)):
        if len(bytes(raw)) > MAX_REFERENCE_BYTES or _REFERENCE not in bytes(raw):
            continue
        try:
            item = _item_decoder.decode(raw)
        except msgspec.ValidationError:  # reading it says what is wrong
            continue
        if item.type == "item_reference":
            found[position] = item.id
    if len(set(map(response_of, found.values()))) > MAX_REFERENCED:
        raise InvalidRequest(
            f"Invalid 'input': items of more than {MAX_REFERENCED} responses are referred to.",
            parameter="input",
        )
    return found


def response_of(item_id: str) -> str:
    """Return the id of the response that made an item: both have the same middle."""
    return ID_PREFIX + item_id.partition("_")[2][:24]


def output_items(stored: StoredResponse) -> dict[str, bytes]:
    """Return the items of an answer, by their ids."""
    return {_id_of(raw): bytes(raw) for raw in _list_decoder.decode(_output(stored))}


def with_items(items: bytes, found: Mapping[int, bytes]) -> bytes:
    """Return the list with the items that it only named."""
    if not found:
        return items
    raws = _list_decoder.decode(items)
    return b"[" + b",".join([found.get(position, bytes(raw)) for position, raw in enumerate(raws)]) + b"]"


def spliced(body: bytes, before: Sequence[bytes], items: bytes, max_bytes: int) -> bytes:
    """Return the same body with more fields at its end, which are those that count. `before` are lists of
    items that come first. Raises InvalidRequest."""
    for earlier in reversed(before):
        items = both_lists(earlier, items)
    check_together(len(body) + len(items), max_bytes, "input")
    return with_fields(body, b'"previous_response_id":null,"input":' + items)


def tell_sent_positions(error: InvalidRequest, sent: Sent, body: bytes) -> None:
    """Have the error name items by where the client has sent them: `body` has others before."""
    items, parameter = items_of(bytes(sent.input)), error.parameter
    if items is None or parameter is None or not parameter.startswith("input["):
        return
    num_all = len(_list_decoder.decode(sent_in(body).input))
    num_before = num_all - len(_list_decoder.decode(items))

    def moved(match: re.Match[str]) -> str:
        return f"input[{max(0, int(match[1]) - num_before)}]"

    error.parameter = _POSITION.sub(moved, parameter)
    error.message = _POSITION.sub(moved, error.message)


def page_of(
    items: bytes, response_id: str, *, limit: int, is_ascending: bool, after: str | None
) -> tuple[list[dict[str, object]], bool]:
    """Items of an input as they are listed, each with an id, and whether there are more behind them. Raises
    InvalidRequest."""
    raws = [*enumerate(_list_decoder.decode(items))]
    if not is_ascending:
        raws.reverse()
    if after is not None:
        places = (
            place
            for place, (position, raw) in enumerate(raws)
            if _listed_id(raw, position, response_id) == after
        )
        last = next(places, None)
        if last is None:
            raise InvalidRequest(f"There is no item '{after[:60]}' in this input.", parameter="after")
        raws = raws[last + 1 :]
    return [_listed(raw, position, response_id) for position, raw in raws[:limit]], len(raws) > limit


def _listed(raw: Raw, position: int, response_id: str) -> dict[str, object]:
    item: dict[str, object] = msgspec.json.decode(raw)
    kind = item.setdefault("type", "message")
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": part, "text": item["content"]}]
    item["id"] = _listed_id(raw, position, response_id)
    return item


def _listed_id(raw: Raw, position: int, response_id: str) -> str:
    """Its own, or one made for it."""
    try:
        item = _item_decoder.decode(raw)
    except msgspec.ValidationError:
        item = _StoredItem()
    return item.id or f"{_PREFIXES.get(item.type, 'item')}_in_{response_id.partition('_')[2]}{position:04x}"


_PREFIXES = {
    "": "msg",
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


def _id_of(raw: Raw) -> str:
    return _item_decoder.decode(raw).id


def _output(stored: StoredResponse) -> bytes:
    return bytes(_answer_decoder.decode(stored.response).output)


def request_items(body: bytes) -> bytes:
    """Return the items of an answered body, as a list in JSON."""
    return items_of(bytes(_sent_decoder.decode(body).input)) or b"[]"


def conversation_of(stored: StoredResponse) -> bytes:
    """Return the items of its input and its output, as a list in JSON."""
    return both_lists(stored.items, _output(stored))
