"""The model's name in a body that is passed on: found, replaced, and never to be read in two ways."""

import httpx
import pytest

from replicas.protocol.passed_routes import MOST_FIELDS, model_in, with_model

JSON = "application/json"
OWN = (b"kv_transfer_params", b"kv\\u005ftransfer_params", b"KV_transfer_params", b"vllm_xargs")
"""Fields that are for servers alone."""
FORM = "multipart/form-data; boundary=cut"


def form(*fields: bytes, end: bytes = b"--cut--\r\n") -> bytes:
    return b"".join(b"--cut\r\n%b\r\n" % each for each in fields) + end


def text(name: str, value: str, more: str = "") -> bytes:
    return f'Content-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}'.encode()


@pytest.mark.parametrize(
    ("body", "model", "sent"),
    [
        (b'{"model": "a", "input": [1.50, 1e400]}', "a", b'{"model":"b","input":[1.50, 1e400]}'),
        (b'{"input": "x"}', None, b'{"model":"b","input":"x"}'),
        (b'{"model": null}', None, b'{"model":"b"}'),
        (b'{"model": "a", "model": "c", "Model": "d"}', "c", b'{"model":"b"}'),
    ],
)
def test_of_a_json_body_the_name_alone_is_replaced(body: bytes, model: str | None, sent: bytes) -> None:
    assert model_in(JSON, body) == model
    assert with_model(JSON, body, "b") == sent


@pytest.mark.parametrize("name", ["model", "Model"])
def test_of_a_form_the_name_alone_is_replaced(name: str) -> None:
    sound = bytes(range(256)) + b"\r\n--cu\r\n\r\n--cut"
    request = httpx.Request(
        "POST", "http://a", data={name: "a", "k[]": "v"}, files={"file": ("ö.mp3", sound, "audio/mpeg")}
    )
    body, kind = request.read(), request.headers["content-type"]
    assert model_in(kind, body) == "a"
    again = with_model(kind, body, "b")
    assert model_in(kind, again) == "b"
    boundary = kind.partition("=")[2].encode()
    first, *parts = body.split(b"--" + boundary)
    assert parts[0].count(b"\r\n\r\na\r\n") == 1
    own = b'\r\ncontent-disposition: form-data; name="model"\r\n\r\nb\r\n'
    assert again == (b"--" + boundary).join([first, own, *parts[1:]])


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (JSON, b"[]"),
        (JSON, b'{"model": 3}'),
        (JSON, b'{"model": "a"'),
        (JSON, b'{"a": ' + b"[" * 100_000),
        (JSON, b"\xff"),
        ("multipart/form-data", form(text("model", "a"))),
        ("multipart/form-data; boundary=cut; boundary=other", form(text("model", "a"))),
        (FORM, b""),
        (FORM, b"before" + form(text("model", "a"))),
        (FORM, form(text("model", "a"), end=b"--cut--\r\nafter")),
        (FORM, form(text("model", "a"), end=b"")),
        (FORM, form(text("model", "a"), text("model", "b"))),
        (FORM, form(text("model", "a"), text("MODEL", "b"))),
        (FORM, form(text("x", "a", '; name="model"'))),
        (FORM, form(text("x", "a", "; name*=utf-8''model"))),
        (FORM, form(text("x", "a", "\r\n folded"))),
        (FORM, form(text("x", "a", '\r\nContent-Disposition: form-data; name="model"'))),
        (FORM, form(text("x", "a", '; filename="\nContent-Disposition: form-data; name=model"'))),
        (FORM, form(text("mo\\del", "a"))),
        (FORM, form(b"Content-Disposition: form-data; name=model\r\n\r\na")),
        (FORM, form(b"\r\nno head")),
        (FORM, form(b"no head")),
        (FORM, form(text("x", "a"), end=b"--cute\r\n" + text("model", "a") + b"\r\n--cut--\r\n")),
        (FORM, form(text("x" * 5000, "a"))),
        (FORM, form(*[text("x", "a")] * (MOST_FIELDS + 1))),
        (FORM, form(b'Content-Disposition: form-data; name="model"\r\n\r\n\xff')),
        *((JSON, b'{"model": "a", "%b": 1}' % name) for name in OWN),
        *((FORM, form(text("model", "a"), text(name.decode(), "1"))) for name in OWN if b"\\" not in name),
    ],
)
def test_what_can_be_read_in_two_ways_or_in_none_is_refused(kind: str, body: bytes) -> None:
    with pytest.raises(ValueError):  # of many kinds
        model_in(kind, body)
