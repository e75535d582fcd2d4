"""Messages between routers and replicas: each survives the wire, and nonsense is a ValueError."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.protocol import bounds, frames, wire
from replicas.protocol.blocks import HASH_BYTES, BlockHash, ImageTokens, pack_token_ids
from replicas.protocol.frames import FinishReason, RefusalCode, RequestKey
from replicas.protocol.prefix_leases import MAX_LEASES, LeaseAnswer, LeaseBreak, PrefixLease
from replicas.protocol.pulls import PullHint, PullPart, PullRequest
from replicas.protocol.status import Epoch, ModelCard, ReplicaId, Role, SplitWay
from tests.examples import examples
from tests.replicas.protocol.filled import Special, filled

U32 = st.integers(0, 2**32 - 1)
POSITIVE = st.integers(1, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I32 = st.integers(-(2**31), 2**31 - 1)
FLOATS = st.floats(allow_nan=False)
TOKENS = st.lists(U32, max_size=6)

SAMPLINGS = st.builds(
    frames.SamplingParams,
    max_tokens=U32,
    min_tokens=U32,
    temperature=FLOATS,
    top_p=FLOATS,
    top_k=U32,
    min_p=FLOATS,
    repetition_penalty=FLOATS,
    presence_penalty=FLOATS,
    frequency_penalty=FLOATS,
    seed=U64,
    logit_bias=st.lists(st.tuples(U32, FLOATS), max_size=3).map(tuple),
    stop_token_ids=TOKENS.map(tuple),
    ignore_eos=st.booleans(),
    num_logprobs=st.none() | U32,
)


def submit(**fields: Any) -> frames.Submit:
    """With no more announced blocks than there are tokens."""
    announced = fields.pop("announced_hashes")[: len(fields["packed_tokens"]) // 4]
    return frames.Submit(announced_hashes=announced, **fields)


IDS = st.text("aZ09._-", min_size=1, max_size=9)
HINTS = st.builds(
    PullHint, IDS, IDS, st.sampled_from(["10.0.0.1:80", "[::1]:9", "host-1.svc:65535"]), POSITIVE
)
SUBMITS = st.builds(
    submit,
    submit_id=U64,
    packed_tokens=TOKENS.map(pack_token_ids),
    sampling=SAMPLINGS,
    root=st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES).map(BlockHash),
    num_choices=st.integers(1, 2**32 - 1),
    media=st.lists(st.builds(ImageTokens, st.binary(max_size=40), U32, U32), max_size=2).map(tuple),
    priority=I32,
    num_output_tokens=U32,
    adapter=st.none() | st.text(max_size=5),
    user=st.binary(max_size=frames.MAX_USER_TAG_BYTES).map(frames.UserTag),
    announced_hashes=st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES).map(BlockHash)).map(tuple),
    announcement_id=U64,
    num_expected_tokens=U32,
    leases=st.lists(st.builds(PrefixLease, POSITIVE, POSITIVE), max_size=3).map(tuple),
    pull=st.none() | HINTS,
    request_id=st.text(max_size=5),
    trace_parent=st.text(max_size=5),
    trace_state=st.text(max_size=5),
)
CLIENT_FRAMES = st.builds(
    frames.ClientFrame,
    submits=st.lists(SUBMITS, max_size=2).map(tuple),
    aborts=st.lists(st.builds(frames.Abort, U64, st.none() | U32), max_size=2).map(tuple),
    knows_draining=st.booleans(),
)
LOG_PROBABILITIES = st.floats(max_value=1.0, allow_nan=False)
LOGPROBS = st.builds(
    frames.TokenLogprobs,
    U32,
    LOG_PROBABILITIES,
    st.lists(st.tuples(U32, LOG_PROBABILITIES), min_size=1, max_size=3).map(tuple),
)


def usages(least: int) -> st.SearchStrategy[frames.PromptUsage]:
    """The whole is the sum of its parts, each of them at least so large."""
    counts = st.integers(least, 2**16)
    return st.builds(
        lambda computed, written, of_others, own, host, disk, pulled, missed, **leases: frames.PromptUsage(
            *(
                computed + sum(missed) + of_others + own + host + disk + pulled,
                of_others + own + host + disk + pulled,
            ),
            *(written, of_others, own),
            num_slower_tier_tokens=host + disk + pulled,
            num_disk_tokens=disk,
            num_pulled_tokens=pulled,
            num_evicted_early_tokens=missed[0],
            num_unmoved_tokens=missed[1],
            num_lost_tokens=missed[2],
            num_expired_tokens=missed[3],
            num_unresumable_tokens=missed[4],
            **leases,
        ),
        *[counts] * 7,
        st.tuples(*[counts] * 5),
        leases=st.lists(filled(LeaseAnswer), min_size=min(1, least), max_size=2).map(tuple),
        broken_by=st.sampled_from(LeaseBreak),
    )


def loads(least: int) -> st.SearchStrategy[frames.LoadSnapshot]:
    def counts(most: int) -> st.SearchStrategy[int]:
        return st.integers(least, most)

    requests, tokens, blocks = counts(bounds.MAX_REQUESTS), counts(bounds.MAX_TOKENS), counts(2**32 - 1)
    seconds = st.floats(least, bounds.MAX_SECONDS, allow_nan=False)
    num_bytes = counts(bounds.MAX_BYTES)
    return st.builds(
        frames.LoadSnapshot,
        *(*[requests] * 2, *[tokens] * 2, *[blocks] * 3, *[seconds] * 6, *[num_bytes] * 4),
    )


DELTAS = st.builds(
    frames.TokenDelta,
    key=st.builds(RequestKey, U64, U32),
    token_ids=TOKENS.map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    usage=st.none() | usages(0),
    logprobs=st.none() | st.lists(LOGPROBS, max_size=3).map(tuple),
    refusal=st.none() | st.builds(frames.Refusal, st.sampled_from(RefusalCode), st.text(max_size=20)),
)
SERVER_FRAMES = st.builds(
    frames.ServerFrame, st.lists(DELTAS, max_size=3).map(tuple), loads(0), U64, st.booleans()
)
NAMES = st.text("aZ0é漢/:-._ ", min_size=1, max_size=9)
BLOCK_SIZES = st.integers(1, 2**16)
CARDS = st.builds(
    ModelCard,
    *[NAMES] * 3,
    *(BLOCK_SIZES, U32, *[st.integers(1, 2**32 - 1)] * 2),
    *(st.lists(U32, max_size=3).map(tuple), U32, U32),
)
ONE_HASH = st.lists(filled(BlockHash), min_size=1, max_size=1).map(tuple)
WHOLE: Special = {
    frames.PromptUsage: usages(1),
    PullHint: HINTS,
    frames.LoadSnapshot: loads(1),
    frames.TokenLogprobs: LOGPROBS,
    (frames.Submit, "announced_hashes"): ONE_HASH,
    (frames.Submit, "announced_points"): ONE_HASH,
    **{(ModelCard, name): st.just(32) for name in ("block_size", "peek_tokens")},
    (ModelCard, "endpoint"): st.sampled_from(["10.0.0.1:80", "[::1]:9"]),
    str: NAMES,
}
"""What `filled` cannot know: there are not more announced blocks than tokens, and other bounds."""


@given(CLIENT_FRAMES)
def test_a_client_frame_survives_the_wire(frame: frames.ClientFrame) -> None:
    assert wire.decode_client_frame(wire.encode(frame)) == frame
    submits = [wire.encode_submit(submit) for submit in frame.submits]
    whole = wire.encode_client_frame(submits, frame.aborts, knows_draining=frame.knows_draining)
    assert wire.decode_client_frame(whole) == frame


@given(SERVER_FRAMES)
def test_a_server_frame_survives_the_wire_whole_and_part_by_part(frame: frames.ServerFrame) -> None:
    encoded = wire.encode(frame)
    whole = wire.decode_server_frame(encoded)
    assert whole == frame
    assert tuple(map(wire.checked_delta, whole.deltas)) == frame.deltas
    loose = wire.decode_loose_frame(encoded)
    assert tuple(map(wire.decode_loose_delta, loose.deltas)) == frame.deltas
    assert wire.decode_load(loose.load) == frame.load
    assert (loose.num_counted_submits, loose.is_draining) == (frame.num_counted_submits, frame.is_draining)


def described(card: ModelCard) -> wire.DescribeResponse:
    return wire.DescribeResponse(card, ReplicaId("r0"), Epoch("e1"), {"tokenizer.json": b"{}"})


@given(CARDS)
def test_a_description_survives_the_wire(card: ModelCard) -> None:
    assert wire.decode_description(wire.encode(described(card))) == described(card)


@settings(max_examples=examples(20))
@given(filled(frames.ClientFrame, WHOLE), filled(frames.ServerFrame, WHOLE), filled(ModelCard, WHOLE))
def test_no_field_of_any_message_is_left_behind(
    to_replica: frames.ClientFrame, to_router: frames.ServerFrame, card: ModelCard
) -> None:
    assert wire.decode_client_frame(wire.encode(to_replica)) == to_replica
    assert wire.decode_server_frame(wire.encode(to_router)) == to_router
    assert wire.decode_description(wire.encode(described(card))) == described(card)


@settings(max_examples=examples(20))
@given(filled(PullRequest), filled(PullPart))
def test_a_pull_survives_the_wire(request: PullRequest, part: PullPart) -> None:
    assert wire.decode_pull_request(wire.encode(request)) == request
    assert wire.decode_pull_part(wire.encode(part)) == part


@pytest.mark.parametrize(
    "broken",
    [
        ["e", bytes(HASH_BYTES), []],
        ["e", bytes(HASH_BYTES - 1), [bytes(HASH_BYTES)]],
        ["e", bytes(HASH_BYTES), [bytes(HASH_BYTES + 1)]],
        ["e", bytes(HASH_BYTES), [bytes(HASH_BYTES)] * 1025],
        ["e" * 300, bytes(HASH_BYTES), [bytes(HASH_BYTES)]],
        ["e"],
    ],
)
def test_a_pull_that_asks_for_nothing_too_much_or_nonsense_is_refused(broken: list[Any]) -> None:
    with pytest.raises(ValueError, match="PullRequest"):
        wire.decode_pull_request(wire.encode(broken))


SUBMIT = {
    "submit_id": 1,
    "packed_tokens": bytes(8),
    "sampling": {"max_tokens": 1},
    "root": bytes(HASH_BYTES),
}


@pytest.mark.parametrize(
    "broken",
    [
        {"packed_tokens": b"123"},
        {"root": b""},
        {"root": bytes(HASH_BYTES + 1)},
        {"num_choices": 0},
        {"num_choices": 2**32},
        {"announced_hashes": [bytes(15)]},
        {"announced_hashes": [bytes(HASH_BYTES)] * 3},
        {"announced_points": [bytes(15)]},
        {"announced_points": [bytes(HASH_BYTES)] * 3},
        {"user": bytes(frames.MAX_USER_TAG_BYTES + 1)},
        {"priority": 2**31},
        {"num_output_tokens": -1},
        {"sampling": {}},
        {"sampling": {"max_tokens": 1, "logit_bias": [[-1, 0.5]]}},
        {"sampling": {"max_tokens": 1, "temperature": "hot"}},
        {"sampling": {"max_tokens": 1, "stop_token_ids": [0] * (frames.MAX_LISTED + 1)}},
        {"media": [{"content_hash": b"", "start": 2**32, "length": 0}]},
        {"leases": [[0, 60]]},
        {"leases": [[1, 0]]},
        {"leases": [[1, -60]]},
        {"leases": [[1, 2**32]]},
        {"leases": [[1, 60]] * (MAX_LEASES + 1)},
        {"trace_parent": b"bytes"},
        {"request_id": None},
        {"tenant": bytes(17)},
        {"lease_share": 1.01},
        {"lease_share": math.inf},
        {"store_share": -0.01},
        {"store_share": math.nan},
        {"pull": ("", "e", "h:1", 1)},
        {"pull": ("r", "e/", "h:1", 1)},
        {"pull": ("r", "e", "unix:/x", 1)},
        {"pull": ("r", "e", "h:0", 1)},
        {"pull": ("r", "e", "h:1")},
    ],
)
def test_a_submit_that_breaks_the_contract_is_a_value_error(broken: dict[str, object]) -> None:
    wire.decode_client_frame(wire.encode([[SUBMIT]]))
    with pytest.raises(ValueError):
        wire.decode_client_frame(wire.encode([[SUBMIT | broken]]))


@pytest.mark.parametrize(
    "sampling", [{"top_k": 2**40}, {"max_tokens": -1}, {"seed": 2**64}, {"temperature": "hot"}]
)
def test_what_no_replica_would_read_cannot_be_encoded(sampling: dict[str, Any]) -> None:
    params = frames.SamplingParams(**({"max_tokens": 1} | sampling))
    with pytest.raises((ValueError, OverflowError)):
        wire.encode_submit(frames.Submit(1, bytes(4), params, BlockHash(bytes(HASH_BYTES))))


USAGE = {"num_prompt_tokens": 2, "num_written_tokens": 0}


@pytest.mark.parametrize(
    "rest",
    [
        [[2**32]],
        [[-1]],
        [[0.5]],
        [[], "unheard of"],
        [[], None, USAGE | {"num_cached_tokens": 3}],
        [[], None, USAGE | {"num_cached_tokens": 1, "num_own_tokens": 1, "num_cross_user_tokens": 1}],
        [[], None, USAGE | {"num_cached_tokens": 1, "num_slower_tier_tokens": 2}],
        [[], None, USAGE | {"num_cached_tokens": -1}],
        [[], None, USAGE | {"num_cached_tokens": 1, "num_evicted_early_tokens": 2}],
        [[], None, USAGE | {"num_cached_tokens": 1, "broken_by": "a whim"}],
        [[], None, USAGE | {"num_cached_tokens": 1, "leases": [[0, 0, "no mood"]]}],
        [[], None, None, [[1, float("nan")]]],
        [[], None, None, [[1, 1.5]]],
        [[], None, None, [[1, -0.5, [[2, float("nan")]]]]],
        [[], None, None, [[1, -0.5, [[2]]]]],
        [[], None, None, None, {"code": "unheard of", "message": ""}],
    ],
)
def test_a_delta_that_breaks_the_contract_spoils_no_other(rest: list[object]) -> None:
    sound: list[object] = [[1, 0], [5]]
    frame = wire.decode_loose_frame(wire.encode([[sound, [[7, 3], *rest], sound], {}]))
    first, broken, last = (wire.decode_loose_delta(delta) for delta in frame.deltas)
    assert first == last == frames.TokenDelta(RequestKey(1, 0), (5,))
    assert broken.key == RequestKey(7, 3)
    if isinstance(broken, frames.TokenDelta):
        with pytest.raises(ValueError):
            wire.checked_delta(broken)


def test_tokens_and_log_probabilities_are_of_the_vocabulary() -> None:
    key = RequestKey(1, 0)
    top = frames.TokenLogprobs(5, -0.5, ((9, -1.0),))
    sound = frames.TokenDelta(key, (5, 9), logprobs=(top,))
    assert wire.checked_delta(sound, vocab_size=10) is sound
    for broken in (frames.TokenDelta(key, (5, 9)), frames.TokenDelta(key, logprobs=(top,))):
        with pytest.raises(ValueError, match="vocabulary of 9"):
            wire.checked_delta(broken, vocab_size=9)


def test_a_refusal_that_talks_too_long_is_cut_short() -> None:
    refusal = frames.Refusal(RefusalCode.INTERNAL, "x" * 10_000)
    delta = wire.checked_delta(frames.TokenDelta(RequestKey(1, 0), refusal=refusal))
    assert delta.refusal is not None
    assert delta.refusal.message == "x" * bounds.MAX_MESSAGE_CHARACTERS


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x92\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        msgspec.msgpack.encode({"deltas": [], "load": {}}),
        msgspec.msgpack.encode([[], {}, "none"]),
        msgspec.msgpack.encode([[[[1, 0]]] * (frames.MAX_DELTAS_PER_FRAME + 1), {}]),
    ],
)
def test_what_is_no_frame_is_a_value_error_whole_and_part_by_part(encoded: bytes) -> None:
    with pytest.raises(ValueError):
        wire.decode_server_frame(encoded)
    with pytest.raises(ValueError):
        wire.decode_loose_frame(encoded)


CARD_OF_BEFORE = {"name": "toy", "fingerprint": "f", "engine": "e", "block_size": 16, "num_blocks": 9} | {
    "context_length": 9,
    "vocab_size": 9,
}


def described_by(card: dict[str, Any]) -> ModelCard:
    return wire.decode_description(wire.encode({"card": card, "replica_id": "r0", "epoch": "e1"})).card


def test_a_card_says_its_part_in_splits_and_one_of_an_earlier_version_is_read_without() -> None:
    card = described_by(CARD_OF_BEFORE | {"role": "prefill", "splits_by": "pull", "of_a_later_version": 1})
    assert (card.role, card.splits_by) == (Role.PREFILL, SplitWay.PULL)
    before = described_by(CARD_OF_BEFORE)
    assert (before.role, before.splits_by) == (Role.BOTH, SplitWay.NONE)
    assert wire.decode_description(wire.encode(described(card))).card == card


@pytest.mark.parametrize(
    "change",
    [
        {"name": "a\nb"},
        {"block_size": 0},
        {"num_blocks": 2**32},
        {"vocab_size": 0},
        {"max_running": -1},
        {"capacity_tokens": -1},
        {"retention_interval": -1},
        {"peek_tokens": 15},
        {"role": "cook"},
        {"splits_by": "mail"},
    ],
)
def test_an_impossible_card_is_a_value_error(change: dict[str, Any]) -> None:
    described_by(CARD_OF_BEFORE)
    with pytest.raises(ValueError):
        described_by(CARD_OF_BEFORE | change)
