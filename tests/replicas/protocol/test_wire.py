"""Dataclass ⇄ protobuf: every field of every message survives, and a broken message is a ValueError."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.protocol import bounds, frames, wire
from replicas.protocol import replica_pb2 as pb
from replicas.protocol.blocks import HASH_BYTES, BlockHash, MediaSpan
from replicas.protocol.frames import FinishReason, RefusalCode, RequestKey
from replicas.protocol.status import ModelCard
from tests.replicas.protocol.filled import Special, filled

U32 = st.integers(0, 2**32 - 1)
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
SUBMITS = st.builds(
    frames.Submit,
    request_id=U64,
    token_ids=TOKENS,
    sampling=SAMPLINGS,
    root=st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES).map(BlockHash),
    num_choices=st.integers(1, 2**32 - 1),
    media=st.lists(st.builds(MediaSpan, st.binary(max_size=40), U32, U32), max_size=2).map(tuple),
    priority=I32,
    num_output_tokens=U32,
    adapter=st.none() | st.text(max_size=5),
    user=st.binary(max_size=wire.MAX_USER_TAG_BYTES).map(frames.UserTag),
    announced_hashes=st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES).map(BlockHash)).map(tuple),
    announcement_id=U64,
    num_expected_tokens=U32,
    origin_id=st.text(max_size=5),
    trace_parent=st.text(max_size=5),
    trace_state=st.text(max_size=5),
).map(lambda it: replace(it, announced_hashes=it.announced_hashes[: len(it.token_ids)]))
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
        lambda computed, written, of_others, own, slower: frames.PromptUsage(
            *(computed + of_others + own + slower, of_others + own + slower, written, of_others, own, slower)
        ),
        *[counts] * 5,
    )


def loads(least: int) -> st.SearchStrategy[frames.LoadSnapshot]:
    def counts(most: int) -> st.SearchStrategy[int]:
        return st.integers(least, most)

    requests, tokens, blocks = counts(bounds.MAX_REQUESTS), counts(bounds.MAX_TOKENS), counts(2**32 - 1)
    seconds = st.floats(least, bounds.MAX_SECONDS, allow_nan=False)
    return st.builds(frames.LoadSnapshot, *[requests] * 2, *[tokens] * 2, *[blocks] * 3, *[seconds] * 2)


DELTAS = st.builds(
    frames.TokenDelta,
    key=st.builds(RequestKey, U64, U32),
    token_ids=TOKENS.map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    usage=st.none() | usages(0),
    # No logprobs and none so far are one thing on the wire.
    logprobs=st.none() | st.lists(LOGPROBS, min_size=1, max_size=3).map(tuple),
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
WHOLE: Special = {
    (frames.Submit, "announced_hashes"): st.lists(filled(BlockHash), min_size=1, max_size=1).map(tuple),
    frames.PromptUsage: usages(1),
    frames.LoadSnapshot: loads(1),
    frames.TokenLogprobs: LOGPROBS,
    (ModelCard, "block_size"): BLOCK_SIZES,
    str: NAMES,
}
"""What `filled` cannot know: there are not more announced blocks than tokens, and other bounds."""


@given(CLIENT_FRAMES)
def test_a_client_frame_survives_the_wire(frame: frames.ClientFrame) -> None:
    message = pb.ClientFrame.FromString(wire.client_frame_to_wire(frame).SerializeToString())
    assert wire.client_frame_from_wire(message) == frame


@given(SERVER_FRAMES)
def test_a_server_frame_survives_the_wire(frame: frames.ServerFrame) -> None:
    message = pb.ServerFrame.FromString(wire.server_frame_to_wire(frame).SerializeToString())
    assert wire.server_frame_from_wire(message) == frame


@given(CARDS)
def test_a_model_card_survives_the_wire(card: ModelCard) -> None:
    assert wire.card_from_wire(pb.ModelCard.FromString(wire.card_to_wire(card).SerializeToString())) == card


@settings(max_examples=20)
@given(filled(frames.ClientFrame, WHOLE), filled(frames.ServerFrame, WHOLE), filled(ModelCard, WHOLE))
def test_no_field_of_any_message_is_left_behind(
    to_replica: frames.ClientFrame, to_router: frames.ServerFrame, card: ModelCard
) -> None:
    assert wire.client_frame_from_wire(wire.client_frame_to_wire(to_replica)) == to_replica
    assert wire.server_frame_from_wire(wire.server_frame_to_wire(to_router)) == to_router
    assert wire.card_from_wire(wire.card_to_wire(card)) == card


GOOD = {"request_id": 1, "token_ids": bytes(8), "root": bytes(HASH_BYTES), "num_choices": 1}


@pytest.mark.parametrize(
    "broken",
    [
        {"token_ids": b"123"},
        {"root": b""},
        {"root": bytes(HASH_BYTES + 1)},
        {"num_choices": 0},
        {"announced_hashes": bytes(15)},
        {"announced_hashes": bytes(3 * HASH_BYTES)},
    ],
)
def test_a_submit_that_breaks_the_contract_is_a_value_error(broken: dict[str, object]) -> None:
    wire.client_frame_from_wire(pb.ClientFrame(submits=[pb.Submit(**GOOD)]))  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        wire.client_frame_from_wire(pb.ClientFrame(submits=[pb.Submit(**(GOOD | broken))]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "delta",
    [
        pb.TokenDelta(refusal=pb.Refusal(code="unheard of")),
        pb.TokenDelta(logprobs=[pb.TokenLogprobs(top_token_ids=[1, 2], top_logprobs=[0.5])]),
        pb.TokenDelta(finish_reason=99),  # type: ignore[arg-type]
        pb.TokenDelta(logprobs=[pb.TokenLogprobs(logprob=float("nan"))]),
        pb.TokenDelta(usage=pb.PromptUsage(num_prompt_tokens=1, num_cached_tokens=2)),
        pb.TokenDelta(
            usage=pb.PromptUsage(
                num_prompt_tokens=2, num_cached_tokens=1, num_own_tokens=1, num_cross_user_tokens=1
            )
        ),
    ],
)
def test_a_delta_that_breaks_the_contract_is_a_value_error(delta: pb.TokenDelta) -> None:
    with pytest.raises(ValueError):
        wire.server_frame_from_wire(pb.ServerFrame(deltas=[delta]))


def test_the_checked_in_stubs_are_what_the_proto_generates(tmp_path: Path) -> None:
    repository = Path(__file__).parents[3]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    proto = "replicas/protocol/replica.proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, proto]
    subprocess.run(command, cwd=repository, check=True)
    generated = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*"))
    assert len(generated) == 3
    for path in generated:
        assert (tmp_path / path).read_text() == (repository / path).read_text(), path
