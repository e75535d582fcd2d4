"""Ways to a prompt's KV: compute it, or bring it from host memory, from disk or from a peer.

Owns the arithmetic by which router and replica compare moving with computing, so that both get the same
answer from the same figures. Decides for one replica only.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from replicas.protocol.blocks import ImageTokens

HOST_MOVE_SECONDS = 0.001
DISK_MOVE_SECONDS = 0.004
PULL_MOVE_SECONDS = 0.02
"""Seconds that a move from a peer takes besides the bytes."""


class Reach(NamedTuple):
    """Leading tokens of a prompt that a replica has: on its device, in host memory or faster, in any of its
    tiers; and that a peer has, from which it could pull them. Each is at least the one before.
    """

    device: int
    host: int
    local: int
    peer: int


class MoveSpeeds(NamedTuple):
    """Seconds per token from host memory to the device, and to host memory from disk and from a peer.

    None if the way does not exist or was never measured; it is then not used. `backlog_seconds` is the time
    of moves under way.
    """

    host: float | None
    disk: float | None
    pull: float | None
    backlog_seconds: float = 0.0


NO_MOVES = MoveSpeeds(None, None, None)


class Way(msgspec.Struct, frozen=True, gc=False):
    """How many tokens to have on the device when the computing begins, and how much longer than the queue
    bringing them there takes.
    """

    num_ready_tokens: int
    extra_seconds: float


def moves(reach: Reach, speeds: MoveSpeeds) -> Iterator[tuple[int, float]]:
    """Yield each tier below the device that reaches deeper than those before it and has a known speed: the
    leading tokens on the device after the move, and the seconds from now."""
    if speeds.host is None:
        return
    seconds, reached = speeds.backlog_seconds, reach.device
    for end, per_token, fixed_seconds in (
        (reach.host, 0.0, HOST_MOVE_SECONDS),
        (reach.local, speeds.disk, DISK_MOVE_SECONDS),
        (reach.peer, speeds.pull, PULL_MOVE_SECONDS),
    ):
        if end <= reached:
            continue
        if per_token is None:
            break
        seconds += fixed_seconds + (end - reached) * (speeds.host + per_token)
        reached = end
        yield end, seconds


def num_image_tokens_left(media: Sequence[ImageTokens], num_ready_tokens: int) -> int:
    """Count tokens of images to encode if that many leading tokens of the prompt are ready: an image is
    encoded whole if any of its tokens is computed."""
    return sum(span.length for span in media if span.start + span.length > num_ready_tokens)


def cheapest_way(
    reach: Reach,
    speeds: MoveSpeeds,
    wait_seconds: float,
    token_seconds: float,
    encode_seconds: Callable[[int], float] | None = None,
) -> Way:
    """Return the cheapest way, if a token takes `token_seconds` to compute and the queue `wait_seconds`.

    KV moves while the request waits, and costs no engine time. `encode_seconds` returns the time for the
    prompt's images by ready tokens.
    """
    device, host, local, peer = reach
    host_seconds, disk_seconds, pull_seconds, seconds = speeds
    if host_seconds is None or peer == device:
        return Way(device, 0.0)
    best_end, best_extra, best_saving = device, 0.0, 0.0
    reached = device
    for end, per_token, fixed_seconds in (
        (host, 0.0, HOST_MOVE_SECONDS),
        (local, disk_seconds, DISK_MOVE_SECONDS),
        (peer, pull_seconds, PULL_MOVE_SECONDS),
    ):
        if end <= reached:
            continue
        if per_token is None:
            break
        seconds += fixed_seconds + (end - reached) * (host_seconds + per_token)
        reached = end
        extra = seconds - wait_seconds if seconds > wait_seconds else 0.0
        saving = (end - device) * token_seconds - extra
        if encode_seconds is not None:
            saving += encode_seconds(device) - encode_seconds(end)
        if saving > best_saving:
            best_end, best_extra, best_saving = end, extra, saving
    return Way(best_end, best_extra)
