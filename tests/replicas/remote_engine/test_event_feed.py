"""Events of a server over real sockets: replays, gaps, restarts and nonsense."""

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest

from replicas.errors import StartupError
from replicas.remote_engine import event_feed
from replicas.remote_engine.event_feed import EventFeed, Events, Restarted
from replicas.remote_engine.facts import EventSource
from replicas.remote_engine.residency import Cleared, Removed, ServerEvent
from tests.replicas.remote_engine.stand_in import StandIn

_DECODER: msgspec.msgpack.Decoder[ServerEvent] = msgspec.msgpack.Decoder(ServerEvent)
read = _DECODER.decode

CLEARED = {"type": "AllBlocksCleared"}


def removed(number: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU", "group_idx": 0}


class Heard:
    """A feed and what it has delivered."""

    def __init__(
        self, server: StandIn, *, replay: str | None = "tcp://127.0.0.1:{}", event_port: int | None = None
    ) -> None:
        self._news: queue.SimpleQueue[Events | Restarted] = queue.SimpleQueue()
        source = EventSource(
            f"tcp://127.0.0.1:{event_port or server.event_port}",
            None if replay is None else replay.format(server.replay_port),
            "",
            binds=True,
        )
        self.feed = EventFeed(source, read, self._news.put)

    def next(self, timeout: float = 10.0) -> Events | Restarted:
        return self._news.get(timeout=timeout)

    def number(self, timeout: float = 10.0) -> int | bytes:
        """Of the removal that comes next, without a gap before it."""
        news = self.next(timeout)
        assert isinstance(news, Events) and not news.after_gap
        (event,) = news.events
        assert isinstance(event, Removed)
        return event.block_hashes[0]


@pytest.fixture
def heard(server: StandIn) -> Iterator[Heard]:
    """Has heard batch 0, by replay."""
    server.publish(removed(0))
    heard = Heard(server)
    assert heard.number() == 0
    yield heard
    heard.feed.close()


def hears(server: StandIn, heard: Heard, numbers: range) -> None:
    """Publish batches with these numbers; each is heard before the next."""
    for number in numbers:
        server.publish(removed(number))
        assert heard.number() == number


def listening(server: StandIn, heard: Heard) -> int:
    """Publish until something arrives live; the next number."""
    for _ in range(100):
        server.publish(removed(server.next_number))
        try:
            heard._news.get(timeout=0.1)
            break
        except queue.Empty:
            continue
    while True:
        try:
            heard._news.get(timeout=0.3)
        except queue.Empty:
            return server.next_number


def test_what_was_before_is_replayed(server: StandIn) -> None:
    for number in range(3):
        server.publish(removed(number))
    heard = Heard(server)
    assert [heard.number() for _ in range(3)] == [0, 1, 2]
    heard.feed.close()


@pytest.mark.parametrize("dropped", [range(700, 900), range(1_100, 1_200)], ids=["middle", "end"])
def test_what_a_replay_drops_is_asked_for_again(server: StandIn, dropped: range) -> None:
    """ZeroMQ drops what is not read in time."""
    server.num_lost = 1_200
    for number in range(1_200):
        server.publish(removed(number))
    server.dropped = {*dropped}
    heard = Heard(server)
    assert [heard.number() for _ in range(1_200)] == list(range(1_200))
    heard.feed.close()


def test_a_gap_is_filled_by_a_replay(server: StandIn, heard: Heard) -> None:
    first = listening(server, heard)
    server.num_lost = 2
    for number in range(first, first + 4):
        server.publish(removed(number))
    assert [heard.number() for _ in range(4)] == list(range(first, first + 4))


def test_a_gap_that_no_replay_fills_is_said(server: StandIn, heard: Heard) -> None:
    first = listening(server, heard)
    server.num_lost = 2
    server.publish(removed(first))
    server.publish(removed(first + 1))
    server.kept.clear()
    server.publish(removed(first + 2))
    news = heard.next()
    assert isinstance(news, Events) and news.after_gap
    server.publish(removed(first + 3))
    assert heard.number() == first + 3


def test_without_a_replay_a_gap_is_a_gap(server: StandIn) -> None:
    heard = Heard(server, replay=None)
    first = listening(server, heard)
    server.num_lost = 1
    server.publish(removed(first))
    server.publish(removed(first + 1))
    news = heard.next()
    assert isinstance(news, Events) and news.after_gap
    heard.feed.close()


@pytest.mark.parametrize("first", [0, 2])
def test_a_restart_is_noticed_whichever_batch_is_heard_first(
    server: StandIn, heard: Heard, first: int
) -> None:
    before = listening(server, heard)
    hears(server, heard, range(before, before + 2))
    server.restart_events()
    server.num_lost = first
    for number in range(first + 1):
        server.publish(removed(number))
    assert heard.next() == Restarted()


def test_a_batch_that_comes_late_again_is_no_restart(server: StandIn, heard: Heard) -> None:
    first = listening(server, heard)
    hears(server, heard, range(first, first + 3))
    server.send(b"", first.to_bytes(8), server.kept[first])
    server.publish(removed(first + 3))
    assert heard.number() == first + 3


def test_what_is_published_while_a_replay_is_awaited_is_no_restart(server: StandIn) -> None:
    server.replays.clear()
    heard = Heard(server)
    time.sleep(0.5)  # it subscribes meanwhile
    for number in range(3):
        server.publish(removed(number))
    server.replays.set()
    assert [heard.number() for _ in range(3)] == [0, 1, 2]
    server.publish(removed(3))
    assert heard.number() == 3
    heard.feed.close()


def test_a_replay_that_is_never_answered_is_not_awaited_for_long(
    server: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_feed, "REPLAY_SECONDS", 0.1)
    server.replays.clear()
    heard = Heard(server)
    first = listening(server, heard)
    server.num_lost = 1
    server.publish(removed(first))
    server.publish(removed(first + 1))
    news = heard.next()
    assert isinstance(news, Events) and news.after_gap
    assert "does not answer which cache events were missed" in caplog.text
    heard.feed.close()


class SilentPath:
    """Forwards connections to a port. Those of a time before `cut` stay open and forward nothing."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._number = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._number += 1

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ends = self._listening.accept()[0], socket.create_connection(("127.0.0.1", self._to))
                for one, other in (ends, ends[::-1]):
                    threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        number = self._number
        with suppress(OSError), one:
            while piece := one.recv(2**16):
                if number == self._number:
                    other.sendall(piece)

    def close(self) -> None:
        self._listening.close()


def test_a_connection_that_is_gone_without_a_word_is_made_anew(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_feed, "HEARTBEAT_MILLISECONDS", 200)
    path = SilentPath(server.event_port)
    heard = Heard(server, event_port=path.port)
    first = listening(server, heard)
    path.cut()
    for number in range(first, first + 100):
        server.publish(removed(number))
        with suppress(queue.Empty):
            assert heard.number(timeout=0.1) == first
            break
    else:
        raise AssertionError("nothing was heard")
    heard.feed.close()
    path.close()


def test_where_nothing_can_be_asked_for_events_are_heard_all_the_same(server: StandIn) -> None:
    heard = Heard(server, replay="tcp://127.0.0.1:http")
    listening(server, heard)
    heard.feed.close()


def test_nonsense_costs_only_itself_and_few_lines_of_the_log(
    server: StandIn, heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    first = listening(server, heard)
    server.publish_raw(b"\xc1 no batch")
    news = heard.next()
    assert isinstance(news, Events) and news.events == [] and not news.after_gap
    for frames in ((b"",), (b"", b"7", b"x"), (b"", bytes(9), b"x")):
        server.send(*frames)
    server.publish_raw(msgspec.msgpack.encode([0.0, "DEEP", 0]).replace(b"\xa4DEEP", b"\x91" * 100_000))
    assert heard.next() == Events([])
    stored = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1, "medium": "GPU!"}
    server.publish(
        *({"type": "Unheard"}, {"type": "BlockRemoved", "block_hashes": "x"}, {**stored, "token_ids": [-1]}),
        msgspec.Raw(msgspec.msgpack.encode(stored).replace(b"GPU!", b"\xff" * 4)),
        CLEARED,
    )
    news = heard.next()
    assert isinstance(news, Events) and news.events == [Cleared()]
    assert [len(caplog.messages), caplog.text.count("\n")] == [3, 3], "one for each kind of defect"
    server.publish_raw(msgspec.msgpack.encode([0.0, [{**removed(first), "to_come": {"a": 1}}], None]))
    assert heard.number() == first


def test_a_server_that_connects_is_listened_to(server: StandIn) -> None:
    """vLLM connects its events to an endpoint without a wildcard."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    news: queue.SimpleQueue[Events | Restarted] = queue.SimpleQueue()
    feed = EventFeed(EventSource(endpoint, None, "", binds=False), read, news.put)
    server._publisher.connect(endpoint)
    for _ in range(50):
        server.publish(CLEARED)
        try:
            assert isinstance(news.get(timeout=0.1), Events)
            break
        except queue.Empty:
            continue
    else:
        raise AssertionError("nothing was heard")
    feed.close()


def test_an_endpoint_elsewhere_is_named() -> None:
    source = EventSource("tcp://192.0.2.77:5557", None, "", binds=False)
    with pytest.raises(StartupError, match=r"tcp://192\.0\.2\.77:5557.*tcp://\*:5557"):
        EventFeed(source, read, lambda _: None)
