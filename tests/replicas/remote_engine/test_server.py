"""What is read of a server: its address, its list of models, its errors, and nothing that shows the key."""

import json
import logging
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from replicas.config import ReplicaConfig
from replicas.errors import StartupError
from replicas.process.settings import SettingsError, build
from replicas.protocol.bounds import MAX_CARD_NAMES, MAX_NAME_CHARACTERS
from replicas.protocol.frames import MAX_ERROR_BYTES, BodyForm, Refusal, RefusalCode, ServerError
from replicas.protocol.wire import DescribeResponse, decode_description, encode
from replicas.remote_engine.dialect import NotThere
from replicas.remote_engine.engine import RemoteEngine
from replicas.remote_engine.facts import CacheSizes, ServerModel
from replicas.remote_engine.model_list import read_models, with_names
from replicas.remote_engine.refusals import RefusalLog, refusal_of
from replicas.remote_engine.server import Ended, Sent, Server, Unreachable, address_of
from replicas.remote_engine.vllm_dialect import VllmDialect
from tests.own_log import own_records
from tests.replicas.remote_engine.stand_in import StandIn
from tests.replicas.scripted_engine import CARD

KEY = "a-key-of-the-server"
DIALECT = VllmDialect(ServerModel("served", "/models/toy", 512, ()), CacheSizes(16, 24, 16), None, 0)


class RawServer:
    """Answers every request on a connection with these bytes, and keeps what was asked."""

    def __init__(self, answer: bytes) -> None:
        self.asked: list[bytes] = []
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while asked := connection.recv(2**16):
                self.asked.append(asked)
                connection.sendall(self._answer)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def news() -> queue.Queue[Any]:
    return queue.Queue()


@contextmanager
def served(answer: bytes, news: queue.Queue[Any]) -> Iterator[tuple[RawServer, Server]]:
    raw = RawServer(answer)
    server = Server(raw.url, key=KEY, rank=None, tell=news.put)
    server.speak(DIALECT)
    server.start()
    yield raw, server
    server.close()
    raw.close()


def next_of(kind: type, news: queue.Queue[Any]) -> Any:
    while not isinstance(found := news.get(timeout=10), kind):
        pass
    return found


def test_an_answer_that_is_no_http_is_told_without_the_key(news: queue.Queue[Any]) -> None:
    with served(b"neither HTTP nor anything else\r\n\r\n", news) as (raw, server):
        looked: Unreachable = next_of(Unreachable, news)
        server.submit("a", Sent({"prompt": [1]}, lambda event: None, 100, 100))  # type: ignore[arg-type, return-value]
        ended: Ended = next_of(Ended, news)
        assert ended.refusal is not None and "breaks off" in ended.refusal.message
        assert KEY.encode() in raw.asked[0]
        assert KEY not in looked.reason + ended.refusal.message
        assert not looked.is_refused


@pytest.mark.parametrize(
    "said",
    [
        *(f'{{"error": {{"message": "no {KEY}"}}}}', f"<html>Bearer {KEY}", '{"error": {"message": "\xff"}}'),
        *("x" * 190 + KEY, "x" * 170 + KEY[:-2]),
    ],
)
def test_a_server_that_says_with_which_key_it_was_asked_is_told_without_it(
    said: str, news: queue.Queue[Any]
) -> None:
    body = said.encode("latin-1")
    answer = b"HTTP/1.1 401 No\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    with served(answer, news) as (raw, server):
        server.submit("a", Sent({"prompt": [1]}, lambda event: None, 100, 100))  # type: ignore[arg-type, return-value]
        ended: Ended = next_of(Ended, news)
        assert ended.refusal is not None and ended.refusal.error is not None
        assert ended.refusal.error.status == 401
        asking = Server(raw.url, key=KEY, rank=None, tell=news.put)
        with pytest.raises(StartupError, match="answers 401") as refused:
            asking.ask("/v1/models")
        asking.close()
        assert KEY[:6] not in f"{ended.refusal.message}{refused.value}"


def test_a_head_that_quotes_the_key_is_told_without_it(news: queue.Queue[Any]) -> None:
    with served(f"HTTP/1.1 200 OK\r\nbad {KEY}: \x01\r\n\r\n".encode(), news) as (_, server):
        server.submit("a", Sent({"prompt": [1]}, lambda event: None, 100, 100))  # type: ignore[arg-type, return-value]
        ended: Ended = next_of(Ended, news)
        assert ended.refusal is not None and "***" in ended.refusal.message
        assert KEY not in ended.refusal.message + next_of(Unreachable, news).reason
        assert ended.refusal.message.isprintable()


def test_cookies_are_not_sent_back(news: queue.Queue[Any]) -> None:
    answer = b"HTTP/1.1 200 OK\r\nset-cookie: who=me\r\ncontent-length: 0\r\n\r\n"
    with served(answer, news) as (raw, _):
        next_of(Unreachable, news)
        next_of(Unreachable, news)
        assert len(raw.asked) == 2 and not [each for each in raw.asked if b"cookie" in each.lower()]


@pytest.mark.parametrize(
    ("url", "configured", "endpoint"),
    [
        ("http://10.0.0.7:8000", None, "10.0.0.7:8000"),
        ("http://10.0.0.7:8000/", None, "10.0.0.7:8000"),
        ("http://10.0.0.7:8000/prefix", None, ""),
        ("http://10.0.0.7:8000/prefix", "10.0.0.7:9000", "10.0.0.7:9000"),
        ("http://10.0.0.7", None, "10.0.0.7:80"),
        ("https://10.0.0.7", None, "10.0.0.7:443"),
        ("http://[fd00::7]:8000", None, "[fd00::7]:8000"),
        ("http://127.0.0.1:8000", None, ""),
        ("http://localhost:8000", None, ""),
        ("http://127.0.0.1:8000", "10.0.0.7:8000", "10.0.0.7:8000"),
    ],
)
def test_an_address_is_that_of_the_url_unless_it_is_loopback_or_below_a_path(
    url: str, configured: str | None, endpoint: str
) -> None:
    assert address_of(url, configured) == endpoint


def test_an_address_is_host_and_port() -> None:
    with pytest.raises(SettingsError, match="engine_endpoint"):
        ReplicaConfig(engine="remote", engine_url="http://a:1", engine_endpoint="http://a:1")


def test_a_card_has_the_address_the_rank_and_the_role(server: StandIn) -> None:
    own = {"engine_rank": 0, "engine_endpoint": "10.0.0.7:8000", "role": "decode"}
    engine = RemoteEngine(build(ReplicaConfig, {"engine": "remote", "engine_url": server.url, **own}))
    assert engine.card.role == "decode"
    assert (engine.card.endpoint, engine.card.endpoint_rank) == ("10.0.0.7:8000", 0)
    engine.close()


def test_a_server_without_an_address_for_gateways_is_named_in_the_log(
    server: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = RemoteEngine(ReplicaConfig(engine="remote", engine_url=server.url))
    assert engine.card.endpoint == ""
    assert f"gateways cannot send requests to the server: {server.url} is on loopback" in caplog.text
    engine.close()


def test_a_server_that_has_the_model_under_another_name_gets_no_requests_of_gateways(
    server: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    engine = RemoteEngine(
        ReplicaConfig(
            engine="remote", engine_url=server.url, model_name="ours", engine_endpoint="10.0.0.7:8000"
        )
    )
    assert engine.card.endpoint == ""
    assert "clients ask for ours" in caplog.text
    engine.close()


INVALID, BUSY, BROKEN = RefusalCode.INVALID_REQUEST, RefusalCode.OVERLOADED, RefusalCode.INTERNAL


@pytest.mark.parametrize(
    ("said", "status", "code", "told", "message"),
    [
        ({"error": {"message": "no", "type": "t", "code": "c", "param": "p"}}, 400, INVALID, 400, "no"),
        ({"error": "Unauthorized"}, 401, INVALID, 401, "Unauthorized"),
        ({"detail": "Not Found"}, 404, INVALID, 404, "Not Found"),
        ({"message": {"detail": [1]}}, 422, INVALID, 422, '{"detail": [1]}'),
        ({"error": {"message": "x" * 9000}}, 413, INVALID, 413, "x" * 2000),
        ({"error": {"message": "\ud83d"}}, 400, INVALID, 400, "?"),
        ({"error": {"message": "a\nb\x1b[1m\u202ec", "type": "d\te"}}, 400, INVALID, 400, "a b [1m c"),
        ({"error": {}}, 501, INVALID, 501, '{"error": {}}'),
        ([], 505, INVALID, 505, "the server answers 505: '[]'"),
        ({"error": {"message": "later"}}, 429, BUSY, 429, "later"),
        ({"error": {"message": "later"}}, 529, BUSY, 529, "later"),
        ({"error": {"message": "bug"}}, 500, BROKEN, 500, "bug"),
        ({"error": {"message": "no", "code": "404"}}, 200, INVALID, 404, "no"),
        ({"error": {"message": "no", "code": 200, "type": "rate_limit_error"}}, 200, BUSY, 429, "no"),
        ({"error": {"message": "no", "code": [], "type": {}}}, 200, BROKEN, 500, "no"),
        ({"type": "error", "message": "no", "status": 503}, 200, BUSY, 503, "no"),
    ],
)
def test_an_error_is_read(said: object, status: int, code: RefusalCode, told: int, message: str) -> None:
    refusal = refusal_of(json.dumps(said).encode(), status)
    assert refusal.error is not None
    assert (refusal.code, refusal.error.status, refusal.message) == (code, told, message)


@pytest.mark.parametrize(("said", "status"), [({"detail": "x"}, 200), ({"error": {}}, 200), ({}, 307)])
def test_what_is_no_error_is_no_answer_either(said: object, status: int) -> None:
    refusal = refusal_of(json.dumps(said).encode(), status)
    assert refusal == Refusal(BROKEN, f"the server answers {status}, and this is no answer")


@pytest.mark.parametrize(
    ("form", "said", "passes"),
    [
        (BodyForm.CHAT, {"error": {"message": "no", "n_ctx": 5}}, True),
        (BodyForm.COMPLETION, {"type": "error", "error": {"type": "t", "message": "no"}}, True),
        (BodyForm.CHAT, {"error": "no"}, False),
        (BodyForm.CHAT, {"detail": "no"}, False),
        (BodyForm.CHAT, {"error": {"message": "no", "more": "x" * MAX_ERROR_BYTES}}, False),
        (BodyForm.MESSAGES, {"type": "error", "error": {"type": "t", "message": "no"}}, True),
        (BodyForm.MESSAGES, {"error": {"type": "t", "message": "no"}}, False),
        (None, {"error": {"message": "no"}}, False),
    ],
)
def test_an_error_in_the_clients_form_passes_whole(form: BodyForm | None, said: Any, passes: bool) -> None:
    error = refusal_of(json.dumps(said, indent=1).encode(), 400, form=form).error
    assert error is not None
    assert error.body == (json.dumps(said, separators=(",", ":")).encode() if passes else b"")


@pytest.mark.parametrize(
    ("told", "least", "most"),
    [
        ("7", 7, 7),
        ("0.5", 0.5, 0.5),
        (format_datetime(datetime.now(UTC) + timedelta(minutes=9), usegmt=True), 400, 600),
        ("Sat, 01 Jan 2000 00:00:00 GMT", 0, 0),
        *((each, None, None) for each in ("-1", "nan", "inf", "1e99", "soon", "", "99 Foo 9999")),
    ],
)
def test_the_time_to_come_back_is_read(told: str, least: float | None, most: float | None) -> None:
    error = refusal_of(b"{}", 429, told).error
    assert error is not None
    seconds = error.retry_after_seconds
    assert seconds is None if least is None or most is None else least <= (seconds or 0) <= most


def test_one_line_a_second_of_each_status_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([5.0] * 3 + [5.5] * 3 + [6.5] * 3)
    log = RefusalLog(logging.getLogger("replicas.test"), clock=lambda: next(times))
    for _ in range(3):
        for status in (400, 401):
            words = "a client's\n" if status == 400 else "a wrong key\n" + "x" * 2000
            log.say(Refusal(INVALID, words, ServerError(status, code="c\n")), "req_1")
        log.say(Refusal(BROKEN, "the server's answer breaks off"), "req_2")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 6 and lines[:3] == lines[3:]
    assert lines[0] == r"the server refuses a request status=400 code='c\n' request_id=req_1 words=None"
    assert r"words='a wrong key\nxxx" in lines[1] and len(lines[1]) < 500
    assert "req_2" in lines[2] and "breaks off" in lines[2]


TOY = {"id": "toy", "root": "/models/toy", "parent": None, "max_model_len": 512}
ALIAS = {**TOY, "id": "gpt-4o"}
TUNED = {"id": "tuned", "root": "/adapters/tuned", "parent": "toy"}


def listed(*entries: Any) -> bytes:
    return json.dumps({"object": "list", "data": entries}).encode()


@pytest.mark.parametrize(
    ("entries", "wanted", "name", "aliases", "adapters"),
    [
        ([TOY, ALIAS], None, "toy", ["gpt-4o"], []),
        ([TOY, ALIAS], "gpt-4o", "gpt-4o", ["toy"], []),
        ([TUNED, TOY, ALIAS], None, "toy", ["gpt-4o"], ["tuned"]),
        ([TOY, ALIAS, {**TUNED, "parent": "gpt-4o"}], None, "toy", ["gpt-4o"], ["tuned"]),
        ([TOY, {**TUNED, "parent": "other"}], None, "toy", [], []),
        ([TOY, TOY, ALIAS, ALIAS], None, "toy", ["gpt-4o"], []),
        # Other models, as Ollama and vendors list them.
        ([TOY, {**ALIAS, "root": "/models/other"}], None, "toy", [], []),
        ([{"id": "a"}, {"id": "b"}], None, "a", [], []),
        ([{"id": "a", "root": None}, {"id": "b", "root": None}], None, "a", [], []),
        ([{"id": "a", "root": ""}, {"id": "b", "root": ""}], None, "a", [], []),
        ([TUNED, {**TUNED, "id": "tuned-2"}], "tuned", "tuned", [], []),
        # llama.cpp's.
        ([{"id": "a", "aliases": ["b", "a", 7]}], None, "a", ["b"], []),
        # What may be anything.
        ([TOY, {"id": 7, "root": [], "parent": {}, "aliases": 7, "meta": []}], None, "toy", [], []),
        ([TOY, {**ALIAS, "parent": ["toy"]}], None, "toy", [], []),
    ],
)
def test_entries_of_one_root_are_names_of_one_model(
    entries: list[Any], wanted: str | None, name: str, aliases: list[str], adapters: list[str]
) -> None:
    model = read_models(listed(*entries), wanted)
    assert (model.served_name, list(model.aliases)) == (name, aliases)
    assert [adapter.name for adapter in model.adapters] == adapters
    card = with_names(replace(CARD, name=name), model)
    assert (list(card.aliases), card.adapters) == (aliases, model.adapters)


@pytest.mark.parametrize(("owner", "is_router"), [("kvasir", True), ("vllm", False), ([], False)])
def test_a_router_of_kvasir_is_known_by_its_models_owner(owner: Any, is_router: bool) -> None:
    model = read_models(listed({**TOY, "owned_by": owner}, {**ALIAS, "owned_by": owner}), None)
    assert (model.is_router, model.aliases) == (is_router, ("gpt-4o",))


def test_an_adapter_is_told_from_another_one_of_its_name_by_where_it_lies() -> None:
    def fingerprint(root: str, base: str = "/models/toy") -> str:
        (adapter,) = read_models(listed({**TOY, "root": base}, {**TUNED, "root": root}), None).adapters
        return adapter.fingerprint

    assert fingerprint("/a") == fingerprint("/a")
    assert len({fingerprint("/a"), fingerprint("/b"), fingerprint("/a", "/models/other")}) == 3


def test_a_model_that_was_given_a_name_of_ours_has_none_of_its_servers() -> None:
    model = read_models(listed(TOY, ALIAS, TUNED), None)
    card = with_names(replace(CARD, name="ours"), model)
    assert (card.aliases, card.adapters) == ((), model.adapters)
    assert with_names(replace(CARD, name="gpt-4o"), model).aliases == ("toy",)


def test_a_list_of_a_million_names_or_of_endless_ones_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    odd = ["", "two\nlines", "x" * 2**20, "\x00"]
    entries = [
        *({**ALIAS, "id": each} for each in odd),
        *({"id": f"n{number}", "root": "/models/toy"} for number in range(100_000)),
        *({"id": f"a{number}", "parent": "toy"} for number in range(100_000)),
    ]
    text = listed(TOY, *entries)
    card = with_names(replace(CARD, name="toy"), read_models(text, None))
    assert len(card.aliases) == MAX_CARD_NAMES - len(odd)
    assert len(card.adapters) == MAX_CARD_NAMES
    assert max(map(len, card.aliases)) <= MAX_NAME_CHARACTERS
    decode_description(encode(DescribeResponse(card, "r0", "e0")))  # type: ignore[arg-type]
    (warned,) = own_records(caplog, logging.WARNING)
    assert "names of the server are ignored" in warned.message
    assert with_names(card, read_models(text, None)) is card
    with pytest.raises(NotThere) as refused:
        read_models(text, "other")
    assert len(str(refused.value)) < 1000
    assert all(len(record.message) < 1000 for record in own_records(caplog, logging.INFO))


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"<html>", b"[]", b'{"data": {}}', b'{"data": []}', b'{"data": [7]}'),
        *(b'{"data": [{"name": 1}]}', b'{"data": [{"id": "\xff"}]}'),
        *(beginning + b"[" * 100_000 for beginning in (b'{"data": ', b'{"data": [{"id": ')),
    ],
)
def test_lists_that_are_none(text: bytes) -> None:
    with pytest.raises(StartupError, match="list of models cannot be read"):
        read_models(text, None)


@pytest.mark.parametrize(
    ("fields", "context_length"),
    [
        ({"max_model_len": 512}, 512),
        ({"meta": {"n_ctx": 512}}, 512),
        *(({"max_model_len": wrong}, None) for wrong in (None, 0, -1, "512", 2**40, 1.5, [])),
    ],
)
def test_a_context_is_told_or_not(fields: dict[str, Any], context_length: int | None) -> None:
    assert read_models(listed({"id": "toy", **fields}), None).context_length == context_length
