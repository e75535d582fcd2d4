"""Dataclass to protobuf and back, both directions of every message.

Owns the mapping. Only this module and the two gRPC shells (replica server, router client) touch
generated classes. Decoding raises ValueError on a message that breaks the contract: types are protobuf's,
bounds are ours.
"""

from replicas.protocol import replica_pb2 as pb
from replicas.protocol.blocks import HASH_BYTES, BlockHash, MediaSpan, pack_token_ids, unpack_token_ids
from replicas.protocol.bounds import (
    MAX_MESSAGE_CHARACTERS,
    checked_card,
    checked_load,
    checked_logprob,
    checked_usage,
)
from replicas.protocol.frames import (
    Abort,
    ClientFrame,
    FinishReason,
    LoadSnapshot,
    PromptUsage,
    Refusal,
    RefusalCode,
    RequestKey,
    SamplingParams,
    ServerFrame,
    Submit,
    TokenDelta,
    TokenLogprobs,
    UserTag,
)
from replicas.protocol.keys import split_hashes
from replicas.protocol.status import Adapter, ModelCard

_FINISH_TO_WIRE = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}


MAX_USER_TAG_BYTES = 16


def client_frame_to_wire(frame: ClientFrame) -> pb.ClientFrame:
    return pb.ClientFrame(
        submits=[submit_to_wire(submit) for submit in frame.submits],
        aborts=[abort_to_wire(abort) for abort in frame.aborts],
        knows_draining=frame.knows_draining,
    )


def abort_to_wire(abort: Abort) -> pb.Abort:
    return pb.Abort(request_id=abort.request_id, choice=abort.choice)


def client_frame_from_wire(message: pb.ClientFrame) -> ClientFrame:
    return ClientFrame(
        submits=tuple(_submit_from_wire(submit) for submit in message.submits),
        aborts=tuple(
            Abort(abort.request_id, abort.choice if abort.HasField("choice") else None)
            for abort in message.aborts
        ),
        knows_draining=message.knows_draining,
    )


def server_frame_to_wire(frame: ServerFrame) -> pb.ServerFrame:
    return pb.ServerFrame(
        deltas=[_delta_to_wire(delta) for delta in frame.deltas],
        load=load_to_wire(frame.load),
        num_counted_submits=frame.num_counted_submits,
        is_draining=frame.is_draining,
    )


def server_frame_from_wire(message: pb.ServerFrame) -> ServerFrame:
    return ServerFrame(
        deltas=tuple(delta_from_wire(delta) for delta in message.deltas),
        load=load_from_wire(message.load),
        num_counted_submits=message.num_counted_submits,
        is_draining=message.is_draining,
    )


def submit_to_wire(submit: Submit) -> pb.Submit:
    """Raises ValueError, OverflowError or TypeError for what the protocol cannot carry."""
    sampling = submit.sampling
    return pb.Submit(
        request_id=submit.request_id,
        token_ids=pack_token_ids(submit.token_ids),
        sampling=pb.Sampling(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            logit_bias=[pb.LogitBias(token_id=token, bias=bias) for token, bias in sampling.logit_bias],
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            num_logprobs=sampling.num_logprobs,
        ),
        root=submit.root,
        num_choices=submit.num_choices,
        media=[
            pb.MediaSpan(content_hash=span.content_hash, start=span.start, length=span.length)
            for span in submit.media
        ],
        priority=submit.priority,
        num_output_tokens=submit.num_output_tokens,
        adapter=submit.adapter,
        user=submit.user,
        announced_hashes=b"".join(submit.announced_hashes),
        announcement_id=submit.announcement_id,
        num_expected_tokens=submit.num_expected_tokens,
        origin_id=submit.origin_id,
        trace_parent=submit.trace_parent,
        trace_state=submit.trace_state,
    )


def _submit_from_wire(message: pb.Submit) -> Submit:
    sampling = message.sampling
    if len(message.root) != HASH_BYTES:
        raise ValueError(f"a namespace root has {HASH_BYTES} bytes, not {len(message.root)}")
    if message.num_choices < 1:
        raise ValueError("a request asks for at least one choice")
    if len(message.user) > MAX_USER_TAG_BYTES:
        raise ValueError(f"a user's tag has at most {MAX_USER_TAG_BYTES} bytes, not {len(message.user)}")
    token_ids = unpack_token_ids(message.token_ids)
    announced_hashes = split_hashes(message.announced_hashes)
    if len(announced_hashes) > len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens cannot become {len(announced_hashes)} announced blocks")
    return Submit(
        request_id=message.request_id,
        token_ids=token_ids,
        sampling=SamplingParams(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            logit_bias=tuple((bias.token_id, bias.bias) for bias in sampling.logit_bias),
            stop_token_ids=tuple(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
        ),
        root=BlockHash(message.root),
        num_choices=message.num_choices,
        media=tuple(MediaSpan(span.content_hash, span.start, span.length) for span in message.media),
        priority=message.priority,
        num_output_tokens=message.num_output_tokens,
        adapter=message.adapter if message.HasField("adapter") else None,
        user=UserTag(message.user),
        announced_hashes=announced_hashes,
        announcement_id=message.announcement_id,
        num_expected_tokens=message.num_expected_tokens,
        origin_id=message.origin_id,
        trace_parent=message.trace_parent,
        trace_state=message.trace_state,
    )


def _delta_to_wire(delta: TokenDelta) -> pb.TokenDelta:
    message = pb.TokenDelta(
        request_id=delta.key.request_id,
        choice=delta.key.choice,
        token_ids=delta.token_ids,
        finish_reason=_FINISH_TO_WIRE[delta.finish_reason],
    )
    if delta.usage is not None:
        message.usage.CopyFrom(
            pb.PromptUsage(
                num_prompt_tokens=delta.usage.num_prompt_tokens,
                num_cached_tokens=delta.usage.num_cached_tokens,
                num_written_tokens=delta.usage.num_written_tokens,
                num_cross_user_tokens=delta.usage.num_cross_user_tokens,
                num_own_tokens=delta.usage.num_own_tokens,
                num_slower_tier_tokens=delta.usage.num_slower_tier_tokens,
            )
        )
    for logprobs in delta.logprobs or ():
        message.logprobs.add(
            token_id=logprobs.token_id,
            logprob=logprobs.logprob,
            top_token_ids=[token for token, _ in logprobs.top],
            top_logprobs=[logprob for _, logprob in logprobs.top],
        )
    if delta.refusal is not None:
        message.refusal.CopyFrom(pb.Refusal(code=delta.refusal.code.value, message=delta.refusal.message))
    return message


def delta_from_wire(message: pb.TokenDelta, vocab_size: int | None = None) -> TokenDelta:
    """`vocab_size`, if it is known, bounds the token ids."""
    usage = refusal = logprobs = None
    if message.finish_reason not in _FINISH_FROM_WIRE:
        raise ValueError(f"there is no finish reason {message.finish_reason}")
    token_ids = tuple(message.token_ids)
    if vocab_size is not None and token_ids and max(token_ids) >= vocab_size:
        raise ValueError(f"token {max(token_ids)} is outside a vocabulary of {vocab_size}")
    if message.HasField("usage"):
        wire = message.usage
        usage = checked_usage(
            PromptUsage(
                wire.num_prompt_tokens,
                wire.num_cached_tokens,
                wire.num_written_tokens,
                wire.num_cross_user_tokens,
                wire.num_own_tokens,
                wire.num_slower_tier_tokens,
            )
        )
    if message.HasField("refusal"):
        text = message.refusal.message[:MAX_MESSAGE_CHARACTERS]
        refusal = Refusal(RefusalCode(message.refusal.code), text)
    if message.logprobs:
        logprobs = tuple(_logprobs_from_wire(entry, vocab_size) for entry in message.logprobs)
    return TokenDelta(
        key=RequestKey(message.request_id, message.choice),
        token_ids=token_ids,
        finish_reason=_FINISH_FROM_WIRE[message.finish_reason],
        usage=usage,
        logprobs=logprobs,
        refusal=refusal,
    )


def _logprobs_from_wire(entry: pb.TokenLogprobs, vocab_size: int | None) -> TokenLogprobs:
    top = tuple(zip(entry.top_token_ids, map(checked_logprob, entry.top_logprobs), strict=True))
    if vocab_size is not None and max([entry.token_id, *entry.top_token_ids]) >= vocab_size:
        raise ValueError(f"log probabilities of tokens outside a vocabulary of {vocab_size}")
    return TokenLogprobs(entry.token_id, checked_logprob(entry.logprob), top)


def load_to_wire(load: LoadSnapshot) -> pb.Load:
    return pb.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_pending_tokens=load.num_pending_tokens,
        num_context_tokens=load.num_context_tokens,
        num_used_blocks=load.num_used_blocks,
        num_cached_blocks=load.num_cached_blocks,
        num_total_blocks=load.num_total_blocks,
        prefill_seconds_per_token=load.prefill_seconds_per_token,
        decode_step_seconds=load.decode_step_seconds,
    )


def load_from_wire(message: pb.Load) -> LoadSnapshot:
    return checked_load(
        LoadSnapshot(
            num_running=message.num_running,
            num_waiting=message.num_waiting,
            num_pending_tokens=message.num_pending_tokens,
            num_context_tokens=message.num_context_tokens,
            num_used_blocks=message.num_used_blocks,
            num_cached_blocks=message.num_cached_blocks,
            num_total_blocks=message.num_total_blocks,
            prefill_seconds_per_token=message.prefill_seconds_per_token,
            decode_step_seconds=message.decode_step_seconds,
        )
    )


def card_to_wire(card: ModelCard) -> pb.ModelCard:
    return pb.ModelCard(
        name=card.name,
        fingerprint=card.fingerprint,
        engine=card.engine,
        block_size=card.block_size,
        num_blocks=card.num_blocks,
        context_length=card.context_length,
        vocab_size=card.vocab_size,
        eos_token_ids=card.eos_token_ids,
        max_batched_tokens=card.max_batched_tokens,
        max_running=card.max_running,
        adapters=[pb.Adapter(name=entry.name, fingerprint=entry.fingerprint) for entry in card.adapters],
    )


def card_from_wire(message: pb.ModelCard) -> ModelCard:
    return checked_card(
        ModelCard(
            name=message.name,
            fingerprint=message.fingerprint,
            engine=message.engine,
            block_size=message.block_size,
            num_blocks=message.num_blocks,
            context_length=message.context_length,
            vocab_size=message.vocab_size,
            eos_token_ids=tuple(message.eos_token_ids),
            max_batched_tokens=message.max_batched_tokens,
            max_running=message.max_running,
            adapters=tuple(Adapter(entry.name, entry.fingerprint) for entry in message.adapters),
        )
    )
