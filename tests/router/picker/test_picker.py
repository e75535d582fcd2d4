"""Requests at a gateway: each is decided like one of our own, told with its body, and read to its end."""

import asyncio
import gzip
import json
from dataclasses import replace
from typing import Any

import grpc
import pytest
from starlette.types import Receive, Scope

from replicas.protocol.blocks import BlockHash, PublishedBeginning
from replicas.protocol.status import ReplicaId
from router.api.api_request import ApiRequest
from router.api.context import ApiContext
from router.api.prepare import PreparedChat
from router.caller import NO_LIMITS, Caller, Limits, Right, Tenant
from router.dispatch import pick
from router.errors import KeyFault
from router.feature import Feature
from router.limits.body_budget import BodyHold
from router.misses import Cause
from router.picker import endpoint, server, stream
from router.picker import ext_proc_pb2 as pb
from router.picker.messages import METHOD, SERVICE, BodyMode, Message
from router.picker.server import SERVICES
from router.picker.stream import MOST_AFTER_END, GatewayStream
from router.prompt.catalog import ServedModel
from tests.router import tiny_model
from tests.router.picker.conftest import A, B, Picking, picking_fleet
from tests.router.picker.gateway import Asked, deaf_call, field, head_of

LONG = "The quick brown fox jumps over the lazy dog. " * 12
COMPLETION: dict[str, Any] = {"model": tiny_model.MODEL, "prompt": LONG, "max_tokens": 4}
CHAT: dict[str, Any] = {
    "model": tiny_model.MODEL,
    "messages": [{"role": "user", "content": LONG}],
    "max_tokens": 4,
}
RESPONSE = {"model": tiny_model.MODEL, "input": LONG, "max_output_tokens": 16}
BODIES = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": RESPONSE,
}
JSON_HEAD = {":status": "200", "content-type": "application/json"}
SSE_HEAD = {":status": "200", "content-type": "text/event-stream; charset=utf-8"}


def answer(num_cached: int, num_prompt: int = 1) -> bytes:
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    return json.dumps({"id": "cmpl-of-server", "choices": [{"text": "four"}], "usage": usage}).encode()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX, BodyMode.BUFFERED])
async def test_every_dialect_gets_a_destination_and_its_body_with_the_salt(
    picking: Picking, path: str, mode: BodyMode
) -> None:
    sent = BODIES[path]
    async with picking.gateway.ask(path, sent, request_mode=mode) as asked:
        told = await asked.until_decided()
        assert told.destination in (A, B) and told.metadata == told.destination
        assert told.headers["content-length"] == str(len(told.body))
        received = json.loads(told.body)
        root = picking.context.catalog.get(tiny_model.MODEL).root(None, None)
        assert received.pop("cache_salt") == root.hex()
        assert received == sent
        assert picking.table.loads.num_reserved == 1
        whole = answer(0)
        assert await asked.answers(JSON_HEAD, whole) == whole
    await picking.until_idle()
    (served,) = picking.ended.served
    assert (served.status, served.error, served.answer_id) == (200, None, "cmpl-of-server")
    assert served.prompts[0].decision is not None


@pytest.mark.parametrize("path", BODIES)
async def test_a_server_is_asked_by_the_models_first_name(picking: Picking, path: str) -> None:
    """Others of its servers may not have the one that the client knows."""
    told = await picking.gateway.decide(path, {**BODIES[path], "model": tiny_model.ALIAS})
    assert json.loads(told.body) | {"cache_salt": ""} == {**BODIES[path], "cache_salt": ""}


async def test_a_salt_of_the_client_is_part_of_the_namespace_and_replaced(picking: Picking) -> None:
    async def salt_of(own: str | None) -> str:
        told = await picking.gateway.decide("/v1/completions", {**COMPLETION, "cache_salt": own})
        salt: str = json.loads(told.body)["cache_salt"]
        return salt

    salts = [await salt_of(own) for own in (None, "one", "two", "one")]
    assert len(set(salts)) == 3 and salts[1] == salts[3]
    assert all(len(bytes.fromhex(each)) == 16 for each in salts)


async def test_a_prompt_goes_where_its_blocks_are(picking: Picking) -> None:
    async with picking.gateway.ask("/v1/chat/completions", CHAT) as asked:
        first = await asked.until_decided()
        for _ in range(5):  # its blocks are foretold while it runs
            assert (
                await picking.gateway.decide("/v1/chat/completions", CHAT)
            ).destination == first.destination


async def test_what_was_cached_is_read_and_explained(picking: Picking) -> None:
    for is_first in (True, False):
        async with picking.gateway.ask("/v1/completions", COMPLETION) as asked:
            await asked.until_decided()
            await asked.answers(JSON_HEAD, answer(0 if is_first else 32))
        await picking.until_idle()
    cold, warm = (served.prompts[0] for served in picking.ended.served)
    assert cold.usage is not None and warm.usage is not None
    num_tokens = len(cold.generation.token_ids)
    assert (cold.usage.num_prompt_tokens, cold.usage.num_cached_tokens) == (num_tokens, 0)
    assert warm.usage.num_cached_tokens == 32 and warm.num_output_tokens == 4
    assert cold.misses is not None and cold.misses.cause is Cause.NEVER_CACHED
    assert picking.ended.explanations.find("default", "cmpl-of-server") is not None


async def test_a_stream_goes_through_as_it_comes(picking: Picking) -> None:
    events = [b'data: {"id":"c1","choices":[{"text":"a"}]}\n\n', b'data: {"id":"c1","choices":[],"usa']
    events += [
        b'ge":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":16}}}\n\n'
    ]
    async with picking.gateway.ask("/v1/completions", {**COMPLETION, "stream": True}) as asked:
        await asked.until_decided()
        assert (
            await asked.answers(SSE_HEAD, *events, b"data: [DONE]\n\n")
            == b"".join(events) + b"data: [DONE]\n\n"
        )
    await picking.until_idle()
    (served,) = picking.ended.served
    assert served.first_token_seconds is not None
    assert served.prompts[0].usage is not None and served.prompts[0].usage.num_cached_tokens == 16
    assert picking.picker._tally.num_other_renderings == 1


@pytest.mark.parametrize("mode", [BodyMode.STREAMED, BodyMode.BUFFERED, BodyMode.NONE])
async def test_answers_that_are_not_full_duplex_go_on_unchanged(picking: Picking, mode: BodyMode) -> None:
    async with picking.gateway.ask("/v1/completions", COMPLETION, response_mode=mode) as asked:
        await asked.until_decided()
        pieces = () if mode is BodyMode.NONE else (answer(16),)
        assert await asked.answers(JSON_HEAD, *pieces) == b""
        assert asked.num_answer_heads == 1
    await picking.until_idle()
    (served,) = picking.ended.served
    assert (served.status, served.error) == (200, None)
    assert (served.prompts[0].usage is None) == (mode is BodyMode.NONE)


async def test_only_the_subset_may_be_chosen() -> None:
    """If it has nobody, there is no wait."""
    async with picking_fleet(wait_seconds=600.0) as picking:
        picking.join("a", A)
        picking.join("b", B)
        for only in (A, B):
            for _ in range(3):
                told = await picking.gateway.decide("/v1/completions", COMPLETION, subset=[only])
                assert told.destination == only
        for subset in ([], ["10.0.0.9:8000"]):
            told = await picking.gateway.decide("/v1/completions", COMPLETION, subset=subset)
            assert (told.status, told.error()["error"]["code"]) == (503, "no_replica_available")


async def test_replicas_without_an_address_are_not_picked() -> None:
    async with picking_fleet() as picking:
        picking.join("inner", "")
        told = await picking.gateway.decide("/v1/completions", COMPLETION)
        assert told.status == 503 and told.headers["retry-after"] == "1"
        assert "has an address for gateways" in told.error()["error"]["message"]
        picking.join("outer", A)
        for _ in range(5):
            assert (await picking.gateway.decide("/v1/completions", COMPLETION)).destination == A


async def test_each_replica_without_an_address_is_said_once(
    picking: Picking, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model.MODEL
    card = replace(picking.context.catalog.get(model).card, engine="remote", endpoint="")
    cards = [(ReplicaId("own"), replace(card, engine="torch")), (ReplicaId("inner"), card)]
    for seen in (cards[:1], cards, cards, [*cards, (ReplicaId("outer"), replace(card, endpoint=A))]):
        picking.picker.see(model, seen)
    own, inner = (record.getMessage() for record in caplog.records)
    assert (
        own.startswith(f"gateways are not sent to replica own of {model}: ") and "its engine is torch" in own
    )
    assert inner.startswith(f"gateways are not sent to replica inner of {model}: its server is on loopback")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_server_that_takes_bodies_is_never_picked_for_these(path: str) -> None:
    async with picking_fleet(catalog=tiny_model.new_catalog()) as picking:
        card = picking.context.catalog.get(tiny_model.MODEL).card
        wordy = replace(card, name="wordy", engine="openai", takes_bodies=("chat", "completion"), endpoint=A)
        picking.context.catalog.add(wordy, tiny_model.bundle())
        picking.table.add_replica(ReplicaId("wordy-1"), wordy, card.block_size)
        told = await picking.gateway.decide(path, {**BODIES[path], "model": "wordy"})
        assert (told.status, told.error()["error"]["code"]) == (503, "no_replica_available")


async def test_a_route_that_is_passed_on_goes_where_the_fewest_requests_are() -> None:
    """To servers that have it, with the model's name as they know it, and with no salt."""
    path, answers = "/v1/embeddings", [b'{"data": [], "usage": {"prompt_tokens": 9,', b' "total_tokens": 9}}']
    async with picking_fleet(catalog=tiny_model.new_catalog()) as picking:
        told = await picking.gateway.decide(path, {"input": "a"})
        assert told.status == 404 and "No server here has this route" in told.error()["error"]["message"]
        plain = picking.context.catalog.get(tiny_model.MODEL).card
        card = replace(plain, name="vectors", engine="openai", takes_bodies=("passed",), routes=(path,))
        picking.context.catalog.add(card, tiny_model.bundle())
        for name, endpoint in (("a", A), ("b", B), ("inner", "")):
            picking.table.add_replica(ReplicaId(name), replace(card, endpoint=endpoint), card.block_size)
        async with picking.gateway.ask(path, {"input": "a", "n": 1.50}) as first:
            told = await first.until_decided()
            for _ in range(5):
                other = await picking.gateway.decide(path, {"input": "a", "model": "vectors"})
                assert {told.destination, other.destination} == {A, B}
            assert told.body == b'{"model":"vectors","input":"a","n":1.5}'
            assert await first.answers(JSON_HEAD, *answers) == b"".join(answers)
        await picking.until_idle()
        (served,) = [each for each in picking.ended.served if each.status == 200]
        assert served.prompts[0].usage is not None and served.prompts[0].usage.num_prompt_tokens == 9
        chat = await picking.gateway.decide("/v1/chat/completions", {**CHAT, "model": "vectors"})
        assert chat.status == 400


@pytest.mark.parametrize("path", BODIES)
async def test_a_server_is_sent_what_was_read_alone(picking: Picking, path: str) -> None:
    """Of fields of one name the last. A priority counts only by a right."""
    hints = {"bootstrap_host": "10.0.0.9", "data_parallel_rank": 3, "request_id": "r", "MAX_TOKENS": 9}
    more = {
        "priority": -100,
        "newer_than_this": [1],
        "mcp_servers": [{"url": "http://10.0.0.9"}],
        "Model": "",
    }
    body = json.dumps({**hints, "temperature": 0.5, **more, **BODIES[path]})[:-1] + ',"temperature":0.25}'
    told = await picking.gateway.decide(path, body.encode())
    sent = json.loads(told.body, object_pairs_hook=lambda pairs: pairs)
    assert sorted(name for name, _ in sent) == sorted([*BODIES[path], "temperature", "cache_salt"])
    assert json.loads(told.body)["temperature"] == 0.25


class OneKey:
    def __init__(self, limits: Limits = NO_LIMITS, rights: frozenset[Right] = frozenset()) -> None:
        self._caller = Caller(tenant=Tenant(name="acme", limits=limits), key_id="k1", rights=rights)

    def find(self, key: str, now: float) -> Caller | KeyFault:
        return self._caller if key == "good" else KeyFault.UNKNOWN


TOOLS: dict[str, list[dict[str, Any]]] = {
    "/v1/messages": [
        {"name": "own", "input_schema": {}},
        {"type": "web_fetch_20250910", "name": "web_fetch"},
    ],
    "/v1/responses": [
        {"type": "function", "name": "own"},
        {"type": "mcp", "server_label": "x", "server_url": "http://10.0.0.9"},
    ],
}


@pytest.mark.parametrize("path", TOOLS)
async def test_tools_that_run_at_the_server_are_passed_only_if_listed(path: str) -> None:
    own, other = TOOLS[path]
    choice = {"type": "auto"} if path == "/v1/messages" else "auto"
    for passed, sent, kept in (
        ((), [own, other], [own]),
        ((), [other], None),
        ((f"tools.{other['type']}", "mcp_servers"), [own, other], [own, other]),
    ):
        async with picking_fleet(pass_fields=passed) as picking:
            picking.join("a", A)
            body = {**BODIES[path], "tools": sent, "tool_choice": choice, "mcp_servers": [1]}
            got = json.loads((await picking.gateway.decide(path, body)).body)
            assert (got.get("tools"), got.get("tool_choice")) == (kept, choice if kept else None)
            assert ("mcp_servers" in got) == bool(passed)


@pytest.mark.parametrize("path", BODIES)
async def test_fields_of_servers_alone_are_refused_whatever_is_listed(path: str) -> None:
    async with picking_fleet(pass_fields=("kv_transfer_params", "vllm_xargs")) as picking:
        picking.join("a", A)
        for name in ("kv_transfer_params", "vllm_xargs"):
            told = await picking.gateway.decide(path, {**BODIES[path], name: {"remote_host": "a"}})
            assert told.status == 400 and "is not supported" in told.error()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_a_tenants_context_holds_at_the_server(path: str) -> None:
    """Also for prompts that are cut: a server's own context is larger."""
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    for most in (200, None):
        limited = OneKey(Limits(max_context=most), frozenset({Right.PRIORITY}))
        async with picking_fleet(keys=limited) as picking:
            picking.join("a", A)
            body = {**BODIES[path], "priority": -3, "truncate_prompt_tokens": -1}
            if path != "/v1/messages":
                del body[name]
            told = await picking.gateway.decide(path, body, headers={"authorization": "Bearer good"})
            await picking.until_idle()
            sent, generation = json.loads(told.body), picking.ended.served[-1].prompts[0].generation
            expected = generation.sampling.max_tokens if most or path == "/v1/messages" else None
            assert (sent.get(name), sent["priority"]) == (expected, -3)
            assert sent["truncate_prompt_tokens"] == len(generation.token_ids)
            assert most is None or expected + len(generation.token_ids) <= most


async def test_a_data_parallel_rank_is_named_or_removed() -> None:
    headers = {"x-data-parallel-rank": "7"}
    for rank, expected in ((1, "1"), (None, "")):
        async with picking_fleet() as picking:
            picking.join("a", A, endpoint_rank=rank)
            told = await picking.gateway.decide("/v1/completions", COMPLETION, headers=headers)
            assert (told.destination, told.headers["x-data-parallel-rank"]) == (A, expected)


async def test_an_earlier_response_is_refused_in_words_that_are_right(picking: Picking) -> None:
    told = await picking.gateway.decide("/v1/responses", {**RESPONSE, "previous_response_id": "resp_1"})
    assert (told.status, told.error()["error"]["param"]) == (400, "previous_response_id")
    assert "No responses are stored behind a gateway" in told.error()["error"]["message"]


async def test_a_body_of_many_pieces() -> None:
    """It is prepared in the process beside the event loop, which may take a while to start."""
    body = {**COMPLETION, "prompt": [7] * 400, "x_note": "u" * 300_000}
    async with picking_fleet(wait_seconds=60.0, pass_fields=("x_note",)) as picking:
        picking.join("a", A)
        async with picking.gateway.ask("/v1/completions", body, piece_bytes=5000) as asked:
            told = await asked.until_decided()
            assert json.loads(told.body)["x_note"] == body["x_note"]
            assert told.num_messages > 4


async def test_a_compressed_body_is_sent_on_as_it_was_before(picking: Picking) -> None:
    compressed = gzip.compress(json.dumps(COMPLETION).encode())
    told = await picking.gateway.decide("/v1/completions", compressed, headers={"content-encoding": "gzip"})
    assert json.loads(told.body)["prompt"] == LONG
    assert told.headers["content-encoding"] == "identity"


@pytest.mark.parametrize("path", BODIES)
async def test_a_bad_body_is_refused_in_its_dialect(picking: Picking, path: str) -> None:
    told = await picking.gateway.decide(path, {**BODIES[path], "temperature": "hot"})
    assert told.status == 400 and told.headers["content-type"] == "application/json"
    assert "temperature" in told.error()["error"]["message"]
    assert told.error().get("type") == ("error" if path == "/v1/messages" else None)
    told = await picking.gateway.decide(path, b"{")
    assert told.status == 400


async def test_an_unknown_model_is_named(picking: Picking) -> None:
    told = await picking.gateway.decide("/v1/completions", {**COMPLETION, "model": "other"})
    assert (told.status, told.error()["error"]["code"]) == (404, "model_not_found")


async def test_other_routes_are_answered_by_the_router(picking: Picking) -> None:
    models = await picking.gateway.decide("/v1/models", None, method="GET")
    assert models.status == 200 and models.error()["data"][0]["id"] == tiny_model.MODEL
    for path, method in (("/v1/embeddings", "POST"), ("//v1/completions", "POST"), ("/metrics", "GET")):
        body = None if method == "GET" else COMPLETION
        assert (await picking.gateway.decide(path, body, method=method)).status == 404
    assert (await picking.gateway.decide("/v1/completions", None, method="GET")).status == 405


async def test_a_body_that_is_too_large_is_refused() -> None:
    async with picking_fleet(max_body_bytes=2000) as picking:
        picking.join("a", A)
        body = {**COMPLETION, "user": "u" * 9000}
        told = await picking.gateway.decide("/v1/completions", body, piece_bytes=1000)
        assert told.status == 413
        declared = {"content-length": "9000"}
        told = await picking.gateway.decide("/v1/completions", body, headers=declared, is_whole=False)
        assert told.status == 413


async def test_a_body_that_stops_coming_is_refused() -> None:
    async with picking_fleet(upload_seconds=0.1) as picking:
        picking.join("a", A)
        assert (await picking.gateway.decide("/v1/completions", b"{", is_whole=False)).status == 408


async def test_more_than_may_be_in_flight_is_refused() -> None:
    async with picking_fleet(max_in_flight=1) as picking:
        picking.join("a", A)
        async with picking.gateway.ask("/v1/completions", COMPLETION) as asked:
            await asked.until_decided()
            told = await picking.gateway.decide("/v1/completions", COMPLETION)
            assert (told.status, told.error()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_more_streams_than_connections_are_refused() -> None:
    async with picking_fleet(max_connections=1) as picking:
        picking.join("a", A)
        async with picking.gateway.ask("/v1/completions", COMPLETION) as asked:
            await asked.until_decided()
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await picking.gateway.decide("/v1/completions", b"")
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("ends_by", ["time", "number"])
async def test_silent_streams_hold_up_nobody(monkeypatch: pytest.MonkeyPatch, ends_by: str) -> None:
    """They count as open, and end by their time or by newer ones."""
    monkeypatch.setattr(server, "FIRST_SECONDS", 0.2 if ends_by == "time" else 60.0)
    monkeypatch.setattr(server, "MOST_SILENT", 20 if ends_by == "time" else 3)
    async with picking_fleet(max_connections=2) as picking:
        picking.join("a", A)
        silent = [Asked(picking.gateway) for _ in range(8)]
        tally = picking.picker._tally
        await picking.until(lambda: tally.num_open == (8 if ends_by == "time" else 3))
        assert (await picking.gateway.decide("/v1/completions", COMPLETION)).destination == A
        if ends_by == "time":
            await picking.until(lambda: tally.num_open == 0)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await silent[0].read()
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        for each in silent:
            each.leave()


async def test_no_part_of_a_body_is_read_before_the_one_before_is_counted(
    picking: Picking, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Message] = []
    take, read_body, goes_on = GatewayStream.take, ApiContext.read_body, asyncio.Event()

    async def noted(stream: GatewayStream, message: Message) -> None:
        taken.append(message)
        await take(stream, message)

    async def late(context: ApiContext, scope: Scope, receive: Receive, held: BodyHold) -> bytes:
        assert (await receive())["body"]
        await goes_on.wait()
        return await read_body(context, scope, receive, held)

    monkeypatch.setattr(GatewayStream, "take", noted)
    monkeypatch.setattr(ApiContext, "read_body", late)
    async with picking.gateway.ask("/v1/completions", b"0123456789", piece_bytes=1) as asked:
        await picking.until(lambda: bool(taken))
        await asyncio.sleep(0.1)
        assert len(taken) == 1
        goes_on.set()
        assert (await asked.until_decided()).status == 400
        assert len(taken) == 10


async def test_peers_that_break_off_are_logged_once_a_second(
    picking: Picking, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether they leave while they are answered, or send nonsense."""
    for _ in range(20):
        asked = picking.gateway.ask("/v1/completions", b"{")
        asked.leave()
        asked = Asked(picking.gateway)
        asked.send(b"\xff")
        with pytest.raises(grpc.aio.AioRpcError):
            await asked.read()
    await picking.until_idle()
    assert picking.picker._tally.num_broken == 20
    said = [record for record in caplog.records if record.name != "asyncio"]  # that is this gateway's side
    assert 1 <= len(said) <= 3


async def test_a_peer_that_takes_no_answer_loses_its_place(
    picking: Picking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "WRITE_SECONDS", 0.2)
    _, writer = await asyncio.open_connection("127.0.0.1", picking.picker.port)
    head = head_of({":method": "GET", ":path": "/v1/models"}, is_last=True)
    message = pb.Request(request_headers=head).SerializeToString()
    writer.write(deaf_call(f"/{SERVICE}/{METHOD}", message))
    tally = picking.picker._tally
    await picking.until(lambda: tally.num_answered == tally.num_open == 1)
    await picking.until(lambda: tally.num_open == 0)
    writer.close()


@pytest.mark.parametrize("how", ["cancels", "ends its side"])
@pytest.mark.parametrize("when", ["in the body", "before the answer", "in the answer"])
async def test_a_client_that_leaves_gives_everything_back(picking: Picking, when: str, how: str) -> None:
    asked = picking.gateway.ask("/v1/completions", COMPLETION, is_whole=when != "in the body")
    if when == "in the body":
        await picking.until(lambda: picking.context.bodies.num_bytes > 0)
    else:
        await asked.until_decided()
        assert picking.table.loads.num_reserved == 1
    if when == "in the answer":
        asked.say(response_headers=head_of(SSE_HEAD))
        asked.say(response_body=pb.Body(body=b"data: {}\n\n"))
        assert await asked.read() and await asked.read()
    if how == "cancels":
        asked.leave()
    else:
        asked.end()
    await picking.until_idle()
    assert picking.ended.served[-1].status == 499
    assert picking.table.num_predictions == 0


async def test_a_client_that_leaves_while_it_waits_for_a_replica() -> None:
    async with picking_fleet(wait_seconds=20.0) as picking:
        picking.join("a", A)
        picking.table.set_stalled(next(iter(picking.table.replica_ids(tiny_model.MODEL))), is_stalled=True)
        asked = picking.gateway.ask("/v1/completions", COMPLETION)
        await picking.until(lambda: picking.dispatcher.room.num_waiting > 0)
        asked.leave()
        await picking.until_idle()
        assert picking.dispatcher.room.num_waiting == 0


async def test_a_request_waits_for_a_replica_that_is_coming(picking: Picking) -> None:
    replica_ids = picking.table.replica_ids(tiny_model.MODEL)
    for each in replica_ids:
        picking.table.set_stalled(each, is_stalled=True)
    async with picking.gateway.ask("/v1/completions", COMPLETION) as asked:
        await asyncio.sleep(0.05)
        picking.table.set_stalled(replica_ids[1], is_stalled=False)
        assert (await asked.until_decided()).destination == B


async def test_a_decision_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "DECISION_SECONDS", -599.9)
    async with picking_fleet(wait_seconds=600.0) as picking:
        picking.join("a", A)
        picking.table.set_stalled(ReplicaId("a"), is_stalled=True)
        told = await picking.gateway.decide("/v1/completions", COMPLETION)
        assert (told.status, told.error()["error"]["code"]) == (503, "too_late")


@pytest.mark.parametrize("content", [b"", b"the end once more"])
@pytest.mark.parametrize("is_decided", [False, True])
@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX, BodyMode.BUFFERED])
async def test_a_repeated_end_of_the_body_changes_nothing(
    picking: Picking, monkeypatch: pytest.MonkeyPatch, mode: BodyMode, is_decided: bool, content: bytes
) -> None:
    """In full duplex it has no reply; a gateway that sends whole bodies gets an empty one after the first."""
    taken: list[Message] = []
    take = GatewayStream.take

    async def noted(stream: GatewayStream, message: Message) -> None:
        await take(stream, message)
        taken.append(message)

    monkeypatch.setattr(GatewayStream, "take", noted)
    for each in (replica_ids := picking.table.replica_ids(tiny_model.MODEL)):
        picking.table.set_stalled(each, is_stalled=True)
    async with picking.gateway.ask("/v1/completions", COMPLETION, request_mode=mode) as asked:
        repeat = pb.Body(body=content, end_of_stream=True)
        if not is_decided:
            asked.say(request_body=repeat)
        await picking.until(lambda: len(taken) == 2 - is_decided)
        picking.table.set_stalled(replica_ids[0], is_stalled=False)
        told = await asked.until_decided()
        if is_decided:
            asked.say(request_body=repeat)
        if mode is BodyMode.BUFFERED:
            assert await asked.read() and asked.num_empty_replies == 1
        assert (told.destination, json.loads(told.body)["prompt"]) == (A, LONG)
        whole = answer(0)
        assert await asked.answers(JSON_HEAD, whole) == whole
        assert not await asked.read()
    await picking.until_idle()
    (served,) = picking.ended.served
    assert (served.status, served.error) == (200, None)


async def test_a_body_that_ends_again_and_again_ends_its_stream(picking: Picking) -> None:
    async with picking.gateway.ask("/v1/completions", COMPLETION) as asked:
        await asked.until_decided()
        for _ in range(MOST_AFTER_END + 1):
            asked.say(request_body=pb.Body(end_of_stream=True))
        assert not await asked.read()
    await picking.until_idle()


async def test_a_server_that_refuses_is_counted(picking: Picking) -> None:
    async with picking.gateway.ask("/v1/completions", COMPLETION) as asked:
        await asked.until_decided()
        assert await asked.answers({":status": "503"}, b"full") == b"full"
    await picking.until_idle()
    assert (picking.ended.served[0].status, picking.ended.served[0].error) == (503, "ServerRefused")


async def test_an_answer_of_the_gateway_itself_ends_the_request(picking: Picking) -> None:
    async with picking.gateway.ask("/v1/completions", COMPLETION, is_whole=False) as asked:
        assert await asked.answers({":status": "408"}, b"slow") == b"slow"
    await picking.until_idle()
    assert picking.ended.served[0].status == 499


async def test_a_computed_prompt_is_no_load_on_top_of_what_the_replica_says(picking: Picking) -> None:
    (replica_id, _) = picking.table.replica_ids(tiny_model.MODEL)
    async with picking.gateway.ask("/v1/completions", COMPLETION, subset=[A]) as asked:
        await asked.until_decided()
        assert picking.table.load(replica_id).num_pending_tokens > 100
        await asked.answers(SSE_HEAD, b"data: {}\n\n", b"")
        assert picking.table.load(replica_id).num_pending_tokens == 0


async def test_load_that_the_replica_counts_by_now_is_counted_once(
    picking: Picking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is not streamed says nothing until its end."""
    monkeypatch.setattr(pick, "SEEN_SECONDS", 0.0)
    (replica_id, _) = picking.table.replica_ids(tiny_model.MODEL)
    async with picking.gateway.ask("/v1/completions", COMPLETION, subset=[A]) as asked:
        await asked.until_decided()
        await picking.until(lambda: picking.table.load(replica_id).num_requests == 0)
        assert picking.table.loads.num_reserved == 1


class Meddling(Feature):
    """Has a prompt go on from other tokens than its text."""

    async def encoded(self, request: ApiRequest, model: ServedModel, chat: PreparedChat) -> PreparedChat:
        return chat._replace(token_ids=[7, 7, 7])

    def beginning(self, model: ServedModel, packed_tokens: bytes) -> PublishedBeginning | None:
        raise AssertionError("the server takes one root for a prompt")


async def test_a_conversation_is_rendered_as_the_server_renders_it(picking: Picking) -> None:
    """Never from the tokens of an earlier answer, which the server does not go on from."""
    picking.context.add(Meddling())
    said = {"role": "assistant", "content": "Hello"}
    turns = [*CHAT["messages"], said, {"role": "user", "content": "Go on"}]
    await picking.gateway.decide("/v1/chat/completions", {**CHAT, "messages": turns})
    await picking.until_idle()
    generation = picking.ended.served[0].prompts[0].generation
    model = picking.context.catalog.get(tiny_model.MODEL)
    text = model.template.render(turns, add_generation_prompt=True)
    assert list(generation.token_ids) == model.tokenizer.encode(text)


async def test_keys_are_asked_for_as_at_the_http_port() -> None:
    async with picking_fleet(keys=OneKey()) as picking:
        picking.join("a", A)
        for key, status in ((None, 401), ("bad", 401), ("good", None)):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            told = await picking.gateway.decide("/v1/completions", COMPLETION, headers=headers)
            assert told.status == status
        own = BlockHash(bytes.fromhex(json.loads(told.body)["cache_salt"]))
        model = picking.context.catalog.get(tiny_model.MODEL)
        assert own == model.root("tenant:acme", None) != model.root(None, None)
        health = await picking.gateway.decide("/health", None, method="GET")
        assert health.status == 200


async def test_health() -> None:
    async with picking_fleet() as picking:
        names = {name: field(1, name.encode()) if name else b"" for name in SERVICES}
        before = {name: await picking.gateway.check(asking) for name, asking in names.items()}
        assert before == {name: b"\x08\x01" if name == "liveness" else b"\x08\x02" for name in SERVICES}
        picking.join("a", A)
        assert {await picking.gateway.check(asking) for asking in names.values()} == {b"\x08\x01"}
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await picking.gateway.check(field(1, b"other"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED])
async def test_a_gateway_that_does_not_send_bodies_is_told(picking: Picking, mode: BodyMode) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await picking.gateway.decide("/v1/completions", b"", request_mode=mode)
    assert "set it to FULL_DUPLEX_STREAMED" in (error.value.details() or "")


async def test_nonsense_ends_one_stream_alone(picking: Picking) -> None:
    async with picking.gateway.ask("/v1/completions", COMPLETION, is_whole=False) as asked:
        asked.send(b"\xff\xff")
        assert not await asked.read()
    await picking.until_idle()
    assert (await picking.gateway.decide("/v1/completions", COMPLETION)).destination in (A, B)
