"""What waits for one router goes to it in messages that it can take."""

import time

from replicas.protocol.frames import LoadSnapshot, RequestKey, TokenDelta
from replicas.serving.router_stream import MAX_FRAME_BYTES, RouterStream


def test_bodies_that_wait_go_in_messages_of_a_bounded_size() -> None:
    stream = RouterStream(LoadSnapshot(), time.monotonic)
    piece = bytes(MAX_FRAME_BYTES // 4 + 1)
    for number in range(10):
        stream.put(TokenDelta(RequestKey(number, 0), body=piece))
        stream.put(TokenDelta(RequestKey(number, 0), (1,)))
    frames = []
    while stream.wanted.is_set():
        frames.append(stream.take().deltas)
    assert [len(deltas) for deltas in frames] == [6, 6, 6, 2]
    assert [delta.key.number for deltas in frames for delta in deltas] == sorted([*range(10), *range(10)])
    stream.put(TokenDelta(RequestKey(1, 0), (1,)))
    assert len(stream.take().deltas) == 1
