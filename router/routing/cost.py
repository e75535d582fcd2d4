"""The cost of serving a request at a replica, in seconds.

Owns the arithmetic and its parameters. `decision.py` decides which replicas are compared, and between
near-ties.

    cost(r) = max(wait(r), move(ready at r)) + prefill(rest)
            + delay_price * requests at r * prefill(rest)
            + room_price * fill(r) * new on r's device * the fleet's seconds per token
            + future_price * tokens too many at r * the seconds to have one again

The first two terms are the expected time to first token. The third is the others' loss: requests that
decode or wait at r stand still while the prompt is computed. So long prompts gather where they disturb few,
and short ones pass them by. The fourth is the price of room in r's cache: computed tokens evict others, the
more surely the fuller the cache. So a full fleet pays for copies, and while there is room, sessions spread
into it. The price is the same where evicted KV could be loaded again: a lower one spreads prompts with a
common prefix over too many devices, and running requests lack room (`loadtests/log/2026-11.md` has the
figures).

The last term is for turns of programs (`router/programs/`): what live programs at home at r need beyond its
room is computed, or loaded from host memory, again at their next turns. The terms before it see this instant,
in which most programs pause.

How much of the prompt is *ready* when its turn comes is a choice, and the cheapest counts: KV on the device
alone, or also in host memory, on disk, or deeper at a peer. KV moves while the request waits and costs no
engine time, so only a move longer than the queue delays it. Its duration is the replica's own measurement;
a way of unknown speed is never taken.

For a prompt with images, prefill(rest) includes encoding every image that is not ready whole, once a
replica has measured that.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import msgspec

from replicas.protocol.blocks import ImageTokens
from replicas.protocol.ways import Reach, cheapest_way, num_image_tokens_left
from router.routing.load import ReplicaLoad

SPEED_BAND = 2.0
"""Replicas whose measured speed is within this factor of the median count as equally fast.

Measured rates wobble with the size of the last prompts; taken literally they would send every cold
prompt to the replica that last looked fastest, and no bucket would keep its home."""

SPEED_LIMIT = 8.0
"""No replica counts as slower or faster than the median by more: a wrong measurement must not starve it."""

LEAST_FILL = 0.2
"""No cache counts as emptier: it will not stay so, and bursts of equal prompts should meet from the start."""

LONGEST_SECONDS = 60.0
"""Bound on measured rates. Higher, negative and non-numeric ones are ignored: one such number in the median
would spoil every cost."""


@dataclass(frozen=True, slots=True)
class CostParameters:
    """`room_price` is that of computing a token into a full cache, in times of computing it, and
    `delay_price` the share of a prefill that each request at the same replica counts for; with both 0,
    the cost is the plain expected time to first token. `future_price` is that of a token that live programs
    need beyond the room of their replica, in times of having it again. `split_room_price` is the share of
    `room_price` that a prompt costs at a replica that decodes it alone, `split_delay_price` (None is
    `delay_price`) that of delays at a decoder whose prompts others may compute, and `nixl_seconds_per_token`
    the time in which a server's connector is taken to move a token: no card says it.

    A request goes by affinity among replicas within `near_tie_tokens` of prefill and
    `near_tie_requests` of the cheapest. Fleets up to `num_compared_candidates` are compared whole;
    beyond, the first of the affinity order, the deepest holders and the idlest of a random draw.
    """

    room_price: float = 3.0
    delay_price: float = 0.05
    future_price: float = 1.0
    split_room_price: float = 0.3
    split_delay_price: float | None = None
    nixl_seconds_per_token: float = 3e-5
    near_tie_tokens: int = 256
    near_tie_requests: int = 4
    default_prefill_seconds_per_token: float = 1e-4
    default_decode_step_seconds: float = 1e-2
    num_compared_candidates: int = 16
    num_affinity_candidates: int = 4
    num_holder_candidates: int = 4
    num_idle_candidates: int = 4


class FleetRates(NamedTuple):
    """Rates of a typical replica, assumed for unmeasured ones."""

    prefill_seconds_per_token: float
    decode_step_seconds: float
    encode_seconds_per_token: float = 0.0


class Cost(msgspec.Struct, frozen=True, gc=False):
    """`num_ready_tokens` is the cheapest amount to have on the device when computing begins, and
    `move_seconds` how much longer than the queue bringing it there takes. A prompt token takes
    `token_seconds` there. `encode_seconds` of the prefill are for images."""

    wait_seconds: float
    prefill_seconds: float
    delay_seconds: float
    room_seconds: float
    move_seconds: float = 0.0
    num_ready_tokens: int = 0
    token_seconds: float = 0.0
    encode_seconds: float = 0.0
    future_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return (
            self.wait_seconds
            + self.move_seconds
            + self.prefill_seconds
            + self.delay_seconds
            + self.room_seconds
            + self.future_seconds
        )


def fleet_rates(loads: Iterable[ReplicaLoad], parameters: CostParameters) -> FleetRates:
    """Medians of the measured rates, defaults where none was measured."""
    loads = list(loads)
    prefill = [load.prefill_seconds_per_token for load in loads]
    decode = [load.decode_step_seconds for load in loads]
    return FleetRates(
        _typical(prefill, parameters.default_prefill_seconds_per_token),
        _typical(decode, parameters.default_decode_step_seconds),
    )


def typical_encode_seconds(loads: Iterable[ReplicaLoad]) -> float:
    """Return the median encoding time per image token; 0 if none was measured."""
    return _typical([load.encode_seconds_per_token for load in loads], 0.0)


def cost_of(
    load: ReplicaLoad,
    num_tokens: int,
    reach: Reach,
    rates: FleetRates,
    parameters: CostParameters,
    media: Sequence[ImageTokens] = (),
) -> Cost:
    """Return the cost of a prompt of `num_tokens` at a replica with this load and reach.

    Each request that runs or waits there delays this one by a decode step, since their steps share their
    time: of two replicas with equal caches and queues the one with the smaller batch is cheaper. Where the
    places of a batch are counted and taken, it also waits until requests before it have ended.
    """
    rate = _own_or_typical(load.prefill_seconds_per_token, rates.prefill_seconds_per_token)
    step = _own_or_typical(load.decode_step_seconds, rates.decode_step_seconds)
    wait_seconds = load.num_pending_tokens * rate + load.num_requests * step
    if load.num_places and load.num_requests >= load.num_places:
        num_ahead = load.num_requests + 1 - load.num_places
        wait_seconds += num_ahead * min(load.place_seconds, LONGEST_SECONDS) / load.num_places
    if load.num_pending_image_tokens:
        wait_seconds += load.num_pending_image_tokens * _encode_rate(load, rates)
    num_ready_tokens, extra_seconds = reach.device, 0.0
    if reach.peer > num_ready_tokens:
        dearer = 1.0 + parameters.delay_price * load.num_requests
        encode = _encode_seconds(load, rates, media, dearer) if media else None
        way = cheapest_way(reach, load.speeds, wait_seconds, rate * dearer, encode)
        num_ready_tokens, extra_seconds = way.num_ready_tokens, way.extra_seconds
    prefill_seconds = (num_tokens - num_ready_tokens) * rate
    encode_seconds = 0.0
    if media:
        encode_seconds = _encode_seconds(load, rates, media)(num_ready_tokens)
        prefill_seconds += encode_seconds
    fill = load.cache_fill
    return Cost(
        wait_seconds,
        prefill_seconds,
        parameters.delay_price * load.num_requests * prefill_seconds,
        parameters.room_price
        * (fill if fill > LEAST_FILL else LEAST_FILL)
        * (num_tokens - reach.device)
        * rates.prefill_seconds_per_token,
        extra_seconds,
        num_ready_tokens,
        rate,
        encode_seconds,
    )


def with_future(
    cost: Cost, load: ReplicaLoad, num_beyond: int, rates: FleetRates, parameters: CostParameters
) -> Cost:
    """Return the cost where live programs need `num_beyond` tokens too many."""
    seconds = rates.prefill_seconds_per_token
    if load.speeds.host is not None and load.speeds.host < seconds:
        seconds = load.speeds.host
    return msgspec.structs.replace(cost, future_seconds=parameters.future_price * num_beyond * seconds)


def _encode_seconds(
    load: ReplicaLoad, rates: FleetRates, media: Sequence[ImageTokens], times: float = 1.0
) -> Callable[[int], float]:
    """Return the time to encode a prompt's images there, by ready leading tokens."""
    rate = _encode_rate(load, rates) * times
    return lambda num_ready_tokens: rate * num_image_tokens_left(media, num_ready_tokens)


def _encode_rate(load: ReplicaLoad, rates: FleetRates) -> float:
    typical = rates.encode_seconds_per_token
    if not typical:  # the request has no images; those that wait there take what that replica says
        own = load.encode_seconds_per_token
        return own if _is_measured(own) else 0.0
    return _own_or_typical(load.encode_seconds_per_token, typical)


def decode_seconds(load: ReplicaLoad, rates: FleetRates) -> float:
    """Return the time of a decode step there."""
    return _own_or_typical(load.decode_step_seconds, rates.decode_step_seconds)


def _typical(rates: Iterable[float | None], default: float) -> float:
    """Return the median of the measured rates. `statistics.median` takes ten times as long."""
    values = sorted([rate for rate in rates if rate is not None and 0.0 < rate <= LONGEST_SECONDS])
    if not values:
        return default
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def _is_measured(seconds: float | None) -> TypeGuard[float]:
    return seconds is not None and 0.0 < seconds <= LONGEST_SECONDS


def _own_or_typical(own: float | None, typical: float) -> float:
    if own is None or typical / SPEED_BAND <= own <= typical * SPEED_BAND or not _is_measured(own):
        return typical
    return min(max(own, typical / SPEED_LIMIT), typical * SPEED_LIMIT)
