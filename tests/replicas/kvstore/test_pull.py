"""Pulling from peers that follow a script, over real gRPC: what is believed, bounded, and what it costs."""

import contextlib
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import run
from typing import Any

import grpc
import pytest

from replicas.config import ReplicaConfig
from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.layout import ChunkHeader, LayoutId
from replicas.kvstore.layout import encode as encode_header
from replicas.kvstore.on_disk import breaker, transfer_speed
from replicas.kvstore.opening import open_store
from replicas.kvstore.pulling import pull as pull_module
from replicas.kvstore.pulling.incoming import ChunkKind, Ending, PullFailed, Wanted, incoming
from replicas.kvstore.pulling.peers import MAX_PEERS, Peers
from replicas.kvstore.pulling.pull import MAX_TRANSFERS, Pulled, Puller
from replicas.process.settings import SettingsError
from replicas.protocol.pulls import TOO_MANY_PULLS, PullHint, PullPart, PullRequest
from replicas.protocol.service import path
from replicas.protocol.status import Epoch, ReplicaId
from replicas.protocol.tier_figures import MoveFailure
from replicas.protocol.wire import decode_pull_request, encode
from tests.replicas.kvstore.chunk_images import (
    LAYOUT,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    fill,
    header,
    image,
    payload,
    slots,
)
from tests.replicas.kvstore.chunk_names import key, name

KIND = ChunkKind(LAYOUT.digest(), 128, 4, PAYLOAD_BYTES, SLOT_BYTES)
Answer = Callable[[PullRequest, Any], Iterator[PullPart | bytes]]


@dataclass
class ScriptedPeer:
    answer: Answer
    address: str = ""
    num_calls: int = 0
    requests: list[PullRequest] = field(default_factory=list)

    def serve(self, encoded: bytes, context: Any) -> Iterator[PullPart | bytes]:
        self.num_calls += 1
        self.requests.append(decode_pull_request(encoded))
        yield from self.answer(self.requests[-1], context)

    @property
    def hint(self) -> PullHint:
        return PullHint(ReplicaId("r1"), Epoch("e1"), self.address, 1024)


@contextlib.contextmanager
def scripted(answer: Answer) -> Iterator[ScriptedPeer]:
    peer = ScriptedPeer(answer)
    server = grpc.server(ThreadPoolExecutor(24))
    handler = grpc.unary_stream_rpc_method_handler(
        peer.serve, response_serializer=lambda part: part if isinstance(part, bytes) else encode(part)
    )
    service, _, method = path("Pull").removeprefix("/").partition("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    peer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield peer
    finally:
        server.stop(0).wait()


class Clock:
    """Real time, and what a test adds to it."""

    def __init__(self) -> None:
        self.more = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.more


@contextlib.contextmanager
def pulling(clock: Clock | None = None) -> Iterator[Puller]:
    clock = clock or Clock()
    puller = Puller(KIND, Peers(key=None, tls=None, clock=clock), bytes_per_second=1e9, clock=clock)
    try:
        yield puller
    finally:
        assert puller.close(10.0)


def wanted(*paths: str) -> list[Wanted]:
    memory = slots(len(paths))
    return [Wanted(name(each), number, memory[number]) for number, each in enumerate(paths)]


def settle(puller: Puller) -> list[Pulled]:
    found: list[Pulled] = []
    while puller.is_busy:
        puller.wait(0.05)
        found += puller.take_finished()
    return found


def sends(*paths: str) -> Answer:
    def answer(request: PullRequest, context: Any) -> Iterator[PullPart]:
        for index, each in enumerate(paths):
            whole = bytes(image(each))
            yield PullPart(index, whole[:5000])
            yield PullPart(index, whole[5000:])

    return answer


def test_chunks_come_with_their_headers_and_are_asked_for_once() -> None:
    with scripted(sends("a", "ab")) as peer, pulling() as puller:
        chunks = wanted("a", "ab")
        number = puller.pull(peer.hint, chunks)
        found = settle(puller)
        assert [(each.ending, each.transfer, each.key, each.slot) for each in found] == [
            (Ending.FILLED, number, chunk.name.key, chunk.slot) for chunk in chunks
        ]
        assert [each.header.name for each in found if each.header] == [name("a"), name("ab")]
        assert puller.take_failures() == []
        (request,) = peer.requests
        assert request == PullRequest(Epoch("e1"), LAYOUT.digest(), tuple(chunk.name.key for chunk in chunks))
        assert puller.may_pull(peer.hint)


def test_a_peer_that_has_not_all_is_no_liar() -> None:
    with scripted(sends("a")) as peer, pulling() as puller:
        puller.pull(peer.hint, wanted("a", "ab", "abc"))
        assert [each.ending for each in settle(puller)] == [Ending.FILLED, Ending.FAILED, Ending.FAILED]
        assert puller.take_failures() == [MoveFailure.MISSING]
        assert puller.may_pull(peer.hint)


def garbage(request: PullRequest, context: Any) -> Iterator[bytes]:
    yield b"\xc1 this is not msgpack"


def too_large(request: PullRequest, context: Any) -> Iterator[bytes]:
    yield encode([0, bytes(3 << 20)])


def refuses(request: PullRequest, context: Any) -> Iterator[PullPart]:
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another incarnation")
    yield PullPart(0, b"x")


def half(request: PullRequest, context: Any) -> Iterator[PullPart]:
    yield PullPart(0, bytes(image("a"))[:6000])


def endless(request: PullRequest, context: Any) -> Iterator[PullPart]:
    yield from sends("a")(request, context)
    while True:
        yield PullPart(0, bytes(1 << 20))


@pytest.mark.parametrize(
    ("answer", "reasons"),
    [
        (sends("b"), {MoveFailure.DAMAGED}),
        (half, {MoveFailure.DAMAGED}),
        (endless, {MoveFailure.DAMAGED}),
        (refuses, {MoveFailure.REFUSED}),
        (garbage, set(MoveFailure)),
        (too_large, set(MoveFailure)),
    ],
    ids=["another chunk", "half", "endless", "refuses", "garbage", "too large"],
)
def test_a_peer_that_lies_is_left_alone_for_a_while(answer: Answer, reasons: set[MoveFailure]) -> None:
    clock = Clock()
    with scripted(answer) as peer, pulling(clock) as puller:
        puller.pull(peer.hint, wanted("a"))
        (found,) = settle(puller)
        assert found.ending is (Ending.FILLED if answer is endless else Ending.FAILED)
        (failure,) = puller.take_failures()
        assert failure in reasons
        assert not puller.may_pull(peer.hint)
        clock.more += 2.0
        assert puller.may_pull(peer.hint)


def test_a_peer_that_is_busy_with_others_may_be_asked_again_at_once() -> None:
    def is_busy(request: PullRequest, context: Any) -> Iterator[PullPart]:
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, TOO_MANY_PULLS)
        yield PullPart(0, b"x")

    with scripted(is_busy) as peer, pulling() as puller:
        puller.pull(peer.hint, wanted("a"))
        assert [each.ending for each in settle(puller)] == [Ending.FAILED]
        assert puller.take_failures() == [MoveFailure.BUSY]
        assert puller.may_pull(peer.hint)
        peer.answer = sends("a")
        puller.pull(peer.hint, wanted("a"))
        assert [each.ending for each in settle(puller)] == [Ending.FILLED]


def test_a_peer_that_stalls_costs_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "MIN_PAUSE_SECONDS", 300.0)
    over = threading.Event()

    def stalls(request: PullRequest, context: Any) -> Iterator[PullPart]:
        yield PullPart(0, bytes(image("a"))[:100])
        over.wait(30)

    with scripted(stalls) as peer, pulling() as puller:
        puller.pull(peer.hint, wanted("a", "ab"))
        assert [each.ending for each in settle(puller)] == [Ending.FAILED] * 2
        assert puller.take_failures() == [MoveFailure.LATE]
        assert not puller.may_pull(peer.hint)
        over.set()


def test_a_peer_that_vanishes_in_the_middle_is_a_miss() -> None:
    began = threading.Event()

    def vanishes(request: PullRequest, context: Any) -> Iterator[PullPart]:
        yield from sends("a")(request, context)
        began.set()
        context.cancel()
        time.sleep(0.05)

    with scripted(vanishes) as peer, pulling() as puller:
        puller.pull(peer.hint, wanted("a", "ab"))
        assert [each.ending for each in settle(puller)][-1] is Ending.FAILED
        (failure,) = puller.take_failures()
        assert failure in (MoveFailure.UNREACHABLE, MoveFailure.REFUSED)


def test_nobody_there_is_a_miss() -> None:
    with scripted(sends("a")) as peer:
        hint = peer.hint
    with pulling() as puller:
        puller.pull(hint, wanted("a"))
        assert [each.ending for each in settle(puller)] == [Ending.FAILED]
        assert puller.take_failures() == [MoveFailure.UNREACHABLE]


def test_a_slot_in_which_a_thread_hangs_comes_back_when_the_thread_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, may_go_on, hangs = Clock(), threading.Event(), threading.Event()

    def stuck(*arguments: Any) -> Iterator[Any]:
        hangs.set()
        may_go_on.wait(30)
        yield from ()

    monkeypatch.setattr(pull_module, "incoming", stuck)
    with scripted(sends("a")) as peer, pulling(clock) as puller:
        number = puller.pull(peer.hint, wanted("a"))
        assert hangs.wait(30)
        assert puller.take_finished() == []
        clock.more += 10.0
        (overdue,) = puller.take_finished()
        assert (overdue.ending, overdue.transfer) == (Ending.OVERDUE, number)
        assert puller.take_finished() == []
        assert not puller.is_busy, "nobody need look again and again, for ever perhaps"
        may_go_on.set()
        while not puller.is_busy:
            puller.wait(0.05)
        (returned,) = settle(puller)
        assert (returned.ending, returned.slot) == (Ending.RETURNED, overdue.slot)
        assert puller.take_failures() == [MoveFailure.LATE]


def test_without_a_thread_a_pull_is_a_miss_and_the_next_one_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cannot(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    clock = Clock()
    with scripted(sends("a")) as peer, pulling(clock) as puller:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", cannot)
            number = puller.pull(peer.hint, wanted("a", "ab"))
            assert [(each.ending, each.transfer, each.slot) for each in puller.take_finished()] == [
                (Ending.FAILED, number, 0),
                (Ending.FAILED, number, 1),
            ]
            assert puller.take_failures() == [MoveFailure.IO_ERROR]
            assert not puller.is_busy and puller.take_finished() == []
            assert not puller.may_pull(peer.hint), "who tried at once would try for ever"
        clock.more += 2.0
        assert puller.may_pull(peer.hint)
        puller.pull(peer.hint, wanted("a"))
        assert [each.ending for each in settle(puller)] == [Ending.FILLED]


def speaks(request: PullRequest, context: Any) -> Iterator[PullPart]:
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, "what a peer says\nINFO forged")
    yield PullPart(0, b"x")


def misnames(request: PullRequest, context: Any) -> Iterator[PullPart]:
    key, _, last_block = name("a")
    yield PullPart(0, bytes(image(ChunkName(key, name("b").key, last_block))))


@pytest.mark.parametrize(
    ("answer", "reason", "error"),
    [
        (speaks, MoveFailure.REFUSED, r"\w+"),
        (sends("b"), MoveFailure.DAMAGED, "OtherKey"),
        (misnames, MoveFailure.DAMAGED, "PullFailed"),
    ],
)
def test_logs_have_no_keys_and_nothing_that_a_peer_says(
    caplog: pytest.LogCaptureFixture, answer: Answer, reason: MoveFailure, error: str
) -> None:
    caplog.set_level(logging.DEBUG, pull_module.__name__)
    with scripted(answer) as peer, pulling() as puller:
        puller.pull(peer.hint, wanted("a"))
        settle(puller)
    (message,) = [each.getMessage() for each in caplog.records if each.name == pull_module.__name__]
    assert re.fullmatch(f"a pull of KV has failed peer=r1 reason={reason.value} error={error}", message)


def test_what_is_under_way_is_bounded_and_what_waits_too_long_fails() -> None:
    clock, may_go_on = Clock(), threading.Event()

    def waits(request: PullRequest, context: Any) -> Iterator[PullPart]:
        may_go_on.wait(30)
        yield from sends("a")(request, context)

    with scripted(waits) as peer, pulling(clock) as puller:
        for _ in range(MAX_TRANSFERS):
            assert puller.may_pull(peer.hint)
            puller.pull(peer.hint, wanted("a"))
        assert not puller.may_pull(peer.hint)
        while peer.num_calls < pull_module.NUM_THREADS:
            time.sleep(0.01)
        assert puller.backlog_seconds > 0
        clock.more += 1.5
        late = puller.take_finished()
        assert [each.ending for each in late] == [Ending.FAILED] * (MAX_TRANSFERS - pull_module.NUM_THREADS)
        may_go_on.set()
        settle(puller)
        assert peer.num_calls == pull_module.NUM_THREADS
        assert puller.backlog_seconds == 0


def test_the_end_waits_for_no_peer() -> None:
    may_go_on, began = threading.Event(), threading.Event()

    def waits(request: PullRequest, context: Any) -> Iterator[PullPart]:
        began.set()
        may_go_on.wait(30)
        yield from ()

    with scripted(waits) as peer, pulling() as puller:
        puller.pull(peer.hint, wanted("a"))
        assert began.wait(30)
        assert puller.close(10.0)
        assert not puller.may_pull(peer.hint)
        assert [each.ending for each in puller.take_finished()] == [Ending.FAILED]
        may_go_on.set()


def test_speed_is_what_was_set_and_then_what_pulls_show() -> None:
    with scripted(sends("a")) as peer, pulling() as puller:
        assert puller.seconds_per_byte == 1e-9
        for _ in range(1 + (1 << 20) // SLOT_BYTES):
            puller.pull(peer.hint, wanted("a"))
            settle(puller)
        assert puller.seconds_per_byte > 1e-9


def bind(puller: Puller, peer: ScriptedPeer, *paths: str, seconds: float = 50.0) -> int:
    number = puller.new_number()
    hint = PullHint(ReplicaId("r1"), Epoch("e1"), peer.address, 1024, seconds, split_id=7)
    puller.bind(hint, wanted(*paths), number=number, ends_at=puller._clock() + seconds)
    return number


@dataclass
class Computing:
    """A peer that sends its second chunk when it may, and says that it had to wait."""

    may_go_on: threading.Event = field(default_factory=threading.Event)

    def __call__(self, request: PullRequest, context: Any) -> Iterator[PullPart]:
        yield PullPart(0, bytes(image("a")))
        while not self.may_go_on.wait(0.01):
            if not context.is_active():
                return
        yield PullPart(1, bytes(image("ab")), has_waited=True)
        yield PullPart(2, bytes(image("abc")))


def test_a_binding_pull_waits_for_a_peer_that_computes_until_its_own_deadline() -> None:
    clock, peer_of = Clock(), Computing()
    with scripted(peer_of) as peer, pulling(clock) as puller:
        number = bind(puller, peer, "a", "ab", "abc")
        while not puller._finished:
            puller.wait(0.05)
        clock.more += 20.0
        (first,) = puller.take_finished()
        assert first.ending is Ending.FILLED and puller.is_under_way(number)
        assert puller.backlog_seconds == 0, "what is being computed is not on its way"
        peer_of.may_go_on.set()
        assert [each.ending for each in settle(puller)] == [Ending.FILLED] * 2
        assert peer.requests[0].split_id == 7
        assert puller.take_failures() == []


def test_a_peer_that_computes_too_long_has_not_failed() -> None:
    with scripted(Computing()) as peer, pulling() as puller:
        bind(puller, peer, "a", "ab", seconds=0.3)
        assert [each.ending for each in settle(puller)] == [Ending.FILLED, Ending.FAILED]
        assert puller.take_failures() == [MoveFailure.LATE]
        assert puller.trusts(peer.hint)


def test_a_binding_pull_that_nobody_waits_for_ends_at_once() -> None:
    with scripted(Computing()) as peer, pulling() as puller:
        number = bind(puller, peer, "a", "ab")
        while not puller._finished:
            puller.wait(0.05)
        puller.cancel(number)
        assert [each.ending for each in settle(puller)] == [Ending.FILLED, Ending.FAILED]
        assert puller.take_failures() == [] and puller.trusts(peer.hint)
        other = puller.pull(peer.hint, wanted("a"))
        puller.cancel(other)
        assert [each.ending for each in settle(puller)] == [Ending.FILLED], "it does not bind"


def test_binding_pulls_leave_the_others_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module, "MAX_BINDING", 8)
    monkeypatch.setattr(pull_module, "IDLE_SECONDS", 0.05)
    peer_of = Computing()
    with scripted(peer_of) as peer, scripted(sends("a")) as other, pulling() as puller:
        for _ in range(8):
            assert puller.may_bind
            bind(puller, peer, "a", "ab", "abc")
        assert not puller.may_bind
        while len(puller._finished) < 8:
            puller.wait(0.05)
        assert len(puller.take_finished()) == 8
        for _ in range(2 * pull_module.NUM_THREADS):
            assert puller.may_pull(other.hint)
            puller.pull(other.hint, wanted("a"))
        while len(puller._finished) < 2 * pull_module.NUM_THREADS:
            puller.wait(0.05)
        assert all(each.ending is Ending.FILLED for each in puller.take_finished())
        peer_of.may_go_on.set()
        assert [each.ending for each in settle(puller)] == [Ending.FILLED] * 16
        while len(puller._threads) > pull_module.NUM_THREADS:
            time.sleep(0.01)


def test_connections_suffice_for_the_transfers_that_run_at_once() -> None:
    assert MAX_PEERS >= pull_module.MAX_BINDING + pull_module.NUM_THREADS


def test_waiting_is_not_the_links_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_speed, "SAMPLE_BYTES", SLOT_BYTES)
    peer_of = Computing()
    with scripted(peer_of) as peer, pulling() as puller:
        for _ in range(5):
            peer_of.may_go_on.clear()
            bind(puller, peer, "a", "ab", "abc")
            time.sleep(0.4)
            peer_of.may_go_on.set()
            settle(puller)
        assert 1e-9 < puller.seconds_per_byte < 0.2 / SLOT_BYTES, "it has waited twice as long for each chunk"


def test_connections_are_few_and_closed_when_idle() -> None:
    clock = Clock()
    with contextlib.ExitStack() as stack:
        peers = Peers(key=None, tls=None, clock=clock)
        some = [stack.enter_context(scripted(sends("a"))) for _ in range(MAX_PEERS + 3)]
        request = PullRequest(Epoch("e1"), LAYOUT.digest(), (name("a").key,))
        for peer in some:
            with peers.call(peer.hint, request, 10.0) as (parts, _):
                assert len(list(parts)) == 2
        assert peers.num_connections == MAX_PEERS
        peers.close_idle()
        assert peers.num_connections == MAX_PEERS
        clock.more += 100.0
        peers.close_idle()
        assert peers.num_connections == 0
        peers.close()


def parts(*images: bytes | bytearray, size: int = 3000) -> list[PullPart]:
    return [
        PullPart(index, bytes(each[at : at + size]))
        for index, each in enumerate(images)
        for at in range(0, len(each), size)
    ]


def named(**fields: object) -> bytearray:
    """The image of chunk "a" with other fields, its checksums right."""
    made = bytearray(SLOT_BYTES)
    changed = replace(header("a"), **fields)  # type: ignore[arg-type]
    fill(memoryview(made), "a")
    encode_header(changed, memoryview(made))
    return made


@pytest.mark.parametrize("size", [1, 4096, 4097, 1 << 20])
def test_chunks_come_whole_and_in_order(size: int) -> None:
    chunks = wanted("a", "ab")
    came = list(incoming(parts(image("a"), image("ab"), size=size), chunks, KIND))
    assert [chunk.name for chunk, _ in came] == [name("a"), name("ab")]
    assert came[1][1] == header("ab")
    assert bytes(chunks[1].memory[4096 : 4096 + PAYLOAD_BYTES]) == payload("ab")


def test_a_peer_may_have_less() -> None:
    assert list(incoming([], wanted("a"), KIND)) == []
    assert len(list(incoming(parts(image("a")), wanted("a", "ab"), KIND))) == 1


def flipped(at: int) -> bytearray:
    made = image("a")
    made[at] ^= 1
    return made


LIES: dict[str, Callable[[], Sequence[PullPart]]] = {
    "another chunk": lambda: parts(image("b")),
    "a flipped bit in the payload": lambda: parts(flipped(5000)),
    "a flipped bit in the header": lambda: parts(flipped(60)),
    "a flipped bit in the checksum": lambda: parts(flipped(4090)),
    "another layout": lambda: parts(named(layout=LayoutId(bytes(16)))),
    "another parent": lambda: parts(named(name=ChunkName(key("a"), key("b"), 3))),
    "another position": lambda: parts(named(name=ChunkName(key("a"), None, 7))),
    "fewer tokens": lambda: parts(named(num_tokens=127)),
    "fewer writers": lambda: parts(named(writers=())),
    "a shorter payload": lambda: parts(named(payload_bytes=PAYLOAD_BYTES - 1)),
    "a longer image": lambda: parts(image("a") + bytes(1), size=SLOT_BYTES + 1),
    "half a chunk": lambda: parts(image("a")[:-1]),
    "one byte": lambda: [PullPart(0, b"x")],
    "the second first": lambda: [PullPart(1, bytes(image("ab")))],
    "one more": lambda: parts(image("a"), image("ab")),
    "zeros": lambda: parts(bytes(SLOT_BYTES)),
}


@pytest.mark.parametrize("lie", LIES)
def test_no_lie_is_believed(lie: str) -> None:
    chunks = wanted("a")
    came: list[ChunkHeader] = []
    with pytest.raises(PullFailed):
        for _, found in incoming(LIES[lie](), chunks, KIND):
            came.append(found)
    assert came == ([header("a")] if lie == "one more" else [])


def test_what_came_before_a_lie_counts() -> None:
    chunks = wanted("a", "ab")
    stream = incoming(parts(image("a"), image("ax")), chunks, KIND)
    assert next(stream)[1] == header("a")
    with pytest.raises(PullFailed):
        next(stream)


def test_an_endless_stream_is_left_at_once() -> None:
    num_taken = 0

    def endless() -> Iterator[PullPart]:
        nonlocal num_taken
        while True:
            num_taken += 1
            yield PullPart(0, bytes(1000))

    with pytest.raises(PullFailed):
        list(incoming(endless(), wanted("a"), KIND))
    assert num_taken <= SLOT_BYTES // 1000 + 1


ON: dict[str, Any] = {"host_kv_bytes": 1 << 20, "pull_bytes_per_second": 1e9}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"pull_bytes_per_second": 1e9}, "pull_bytes_per_second needs host_kv_bytes"),
        ({**ON, "pull_bytes_per_second": 0.0}, "pull_bytes_per_second must be above 0"),
        ({**ON, "tls_certificate": "c", "tls_key": "k"}, "pull_bytes_per_second needs tls_client_ca"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        ReplicaConfig(**settings)


@pytest.mark.parametrize("pulls", [True, False])
def test_memory_is_shared_where_replicas_pull_and_nowhere_else(pulls: bool) -> None:
    settings = ON if pulls else {**ON, "pull_bytes_per_second": None}
    store = open_store(ReplicaConfig(**settings), LAYOUT, PAYLOAD_BYTES)
    assert store is not None
    assert (store.shared is not None) == (store.speeds().pull is not None) == pulls
    assert (store.figures().pulls is not None) == pulls
    store.close()


def test_an_engine_that_does_not_pull_loads_no_grpc() -> None:
    code = """
import sys
from replicas.config import ReplicaConfig
from replicas.kvstore.opening import open_store
from tests.replicas.kvstore.chunk_images import LAYOUT
store = open_store(ReplicaConfig(host_kv_bytes=1 << 20), LAYOUT, 5000)
assert "grpc" not in sys.modules
"""
    run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
