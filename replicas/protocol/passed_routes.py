"""Routes that are passed on to a server: which there may be, and the model's name in their bodies.

Pure. A body is a JSON object, or a form where the route takes files. Of both only the fields are told apart:
routers read the name of the model, and who sends a body on writes the server's own in its place. What could
be read in two ways is refused, so that no server reads another name than the router has.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

ROUTES = (
    "/v1/embeddings",
    "/v2/embed",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
    "/classify",
    "/pooling",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
FORM_ROUTES = ("/v1/audio/transcriptions", "/v1/audio/translations")

FORM = "multipart/form-data"
MOST_FIELDS = 256
"""Most fields of a form."""
MOST_HEAD_BYTES = 4096
"""Longest head of a field of a form."""
MOST_TYPE_CHARACTERS = 256
"""Longest content type."""

SERVERS_OWN = frozenset({"kv_transfer_params", "ec_transfer_params", "vllm_xargs"})
"""Fields by which servers hand KV to each other. Who sets them reads the KV of other prompts, or ends the
server, so no client does."""

_BOUNDARY = re.compile(r'boundary=(?:"([\w\'()+,./:=?-]{1,70})"|([\w\'()+./:=?-]{1,70}))', re.ASCII)
_FIELD = re.compile(
    rb'content-disposition: *form-data; *name="([^"\\\r\n]*)"(?:; *filename="[^"\r\n]*")?'
    rb"(?:; *filename\*=[\w!#$&+^`|~.%'-]*)?",
    re.IGNORECASE,
)
_OTHER_LINE = re.compile(rb"content-(?:type|length|transfer-encoding):[^\r\n]*", re.IGNORECASE)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Field(NamedTuple):
    """`part` is all of it, from the end of the line with the boundary; `model` what it says of the model."""

    name: str
    part: memoryview
    model: bytes | None


def model_in(content_type: str, body: bytes) -> str | None:
    """Return the name of the model that a body asks for; None if it names none. Raises ValueError."""
    boundary = _boundary_of(content_type)
    if boundary is not None:
        names = [each.model for each in _form(boundary, body) if each.model is not None]
        if len(names) > 1:
            raise ValueError("it has the field 'model' twice")
        return names[0].decode() if names else None
    model = _object(body).get("model")
    try:
        return None if model is None else msgspec.json.decode(model, type=str | None)
    except msgspec.MsgspecError as error:
        raise ValueError("the field 'model' is no text") from error


def with_model(content_type: str, body: bytes, name: str) -> bytes:
    """Return the body with this name of its model, and all else as it is. Raises ValueError."""
    boundary = _boundary_of(content_type)
    if boundary is None:
        fields = {key: value for key, value in _object(body).items() if not _is_model(key)}
        return msgspec.json.encode({"model": name, **fields})
    parts = [each.part for each in _form(boundary, body) if each.model is None]
    own = b'\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b' % name.encode()
    delimiter = b"\r\n--" + boundary
    return delimiter.join([b"", own, *parts, b"--\r\n"])[2:]


def _is_model(name: str) -> bool:
    """Whether some server would read it as the model's name: not all mind the case."""
    return name.lower() == "model"


def _check_name(name: str) -> None:
    if name.lower() in SERVERS_OWN:
        raise ValueError(f"the field {name!r} is for servers alone")


def _object(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        found = _fields.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON object: {error}") from error
    for name in found:
        _check_name(name)
    return found


def _boundary_of(content_type: str) -> bytes | None:
    """Return what divides the fields of a form; None for what is no form. Raises ValueError."""
    kind, _, rest = content_type.partition(";")
    if kind.strip().lower() != FORM:
        return None
    found = _BOUNDARY.fullmatch(rest.strip())
    if found is None:
        raise ValueError("its content type names no boundary, or more than that")
    return (found[1] or found[2]).encode()


def _form(boundary: bytes, body: bytes) -> Sequence[_Field]:
    delimiter = b"\r\n--" + boundary
    found: list[_Field] = []
    at, view = len(delimiter) - 2, memoryview(body)
    is_form = body.startswith(delimiter[2:])
    while is_form and len(found) < MOST_FIELDS and (end := body.find(delimiter, at)) >= 0:
        found.append(_field(view[at:end]))
        at = end + len(delimiter)
    if not found or body[at : at + 8].rstrip(b"\r\n") != b"--":
        raise ValueError(f"it is no whole form of up to {MOST_FIELDS} fields")
    return found


def _field(part: memoryview) -> _Field:
    head, end, _ = bytes(part[:MOST_HEAD_BYTES]).partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n") if end else [head]
    names = [found[1] for found in map(_FIELD.fullmatch, lines) if found is not None]
    num_others = sum(_OTHER_LINE.fullmatch(line) is not None for line in lines)
    if first or len(names) != 1 or 1 + num_others != len(lines):
        raise ValueError("the head of one of its fields cannot be read")
    name = names[0].decode()
    _check_name(name)
    return _Field(name, part, bytes(part[len(head) + 4 :]) if _is_model(name) else None)
