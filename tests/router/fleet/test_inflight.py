"""Deltas that were not taken yet."""

from replicas.protocol.frames import RequestKey, TokenDelta
from router.fleet.inflight import BYTES_OF_DELTA, Inflight, Mailbox


def test_a_long_body_waits_like_many_deltas() -> None:
    inflight, key = Inflight(1, 1, Mailbox()), RequestKey(1, 0)
    for body in (None, b"short", bytes(10 * BYTES_OF_DELTA)):
        inflight.deliver(TokenDelta(key, body=body))
    assert inflight.num_waiting == 1 + 1 + 11
    inflight.take()
    assert inflight.num_waiting == 0
