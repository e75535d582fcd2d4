"""ChatHistory: conversations go on from the exact tokens of their earlier answers.

Owns the store of one router process, and when it is used; when other routers are told of an answer, and asked
for one that is not known here; and what is known of how long tools take between two turns. A prompt that goes
on from remembered tokens may be longer than the one that its template writes (reasoning stays in it), so it
gives way where an answer would have no room. An answer is remembered as its client can send it back: not one
that a stop string or the router cut short, nor one that broke off before it said anything.
"""

import enum
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import msgspec

from replicas.protocol.blocks import pack_token_ids
from replicas.protocol.cluster_secret import ClusterSecret
from replicas.protocol.frames import FinishReason
from router.answers.wishes import ToolMode
from router.api.api_request import ApiRequest, tenant_label
from router.api.chat_request import ChatRequest
from router.api.choice_output import TOOL_CALLS, ChoiceOutput
from router.api.context import ApiContext
from router.api.prepare import PreparedChat
from router.encoded import EncodedHistory, EncodedPrompt, EncodedTail
from router.feature import Feature
from router.features.history.history_sync import HistorySync
from router.features.history.redis_history import HistoryBounds, RedisHistory
from router.features.history.sharing import HistorySharing, Sought
from router.generation import Generation
from router.history.canonical import (
    ConversationKey,
    Digest,
    Thought,
    conversation_keys,
    key_after,
    message_digest,
    thought_digest,
)
from router.history.remembered import AskedAnswer, Found, RememberedHistory
from router.history.tool_gaps import ToolGaps
from router.keeping import LeaseRequest
from router.prompt.catalog import ServedModel
from router.shared.instruments import Instrument, counter

LEAST_ROOM_SHARE = 0.25
"""Share of the context for an answer whose length the client leaves open."""

BYTES_PER_TOKEN = 4

STOP, LENGTH = FinishReason.STOP.value, FinishReason.LENGTH.value


class HistoryOutcome(enum.StrEnum):
    """How a conversation with an answer in it continues."""

    EXACT = "exact"
    """It goes on from remembered tokens, and its template would have written the same."""
    DRIFTED = "drifted"
    """It goes on from remembered tokens, and its template would have written others."""
    UNKNOWN = "unknown"
    """None of its answers is remembered."""
    RETOLD = "retold"
    """An answer came back with other reasoning than was generated, so from there on the conversation is as
    its client tells it."""
    REFUSED = "refused"
    """The text after the answer is unknown, or leaves no room for another answer."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Identity of an answer to remember: its root, the key of the messages before it, and what its prompt
    continued from. `ends` are the tokens that end a turn, `answered` is the key through the last answer
    before. For a turn that `may_call` tools, the router counts whether it does, and when the next one comes.
    `starts_in_reasoning` says how to parse the answer."""

    root: bytes
    key: ConversationKey
    ends: frozenset[int]
    parent: Found | None = None
    outcome: HistoryOutcome | None = None
    answered: ConversationKey | None = None
    may_call: bool = False
    starts_in_reasoning: bool = False


class Begun(NamedTuple):
    """How far a conversation is known: `retold` is the position of the last answer that came back with other
    reasoning than was generated."""

    root: bytes
    keys: list[ConversationKey]
    retold: int | None
    found: Found | None


class ChatHistory(Feature):
    """For one event loop. With a room of no bytes it does nothing. With `sync` it sends answers to other
    routers, and asks them."""

    store: HistorySync | None

    def __init__(
        self,
        context: ApiContext,
        sync: HistorySync | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = context.config
        self._turns = context.turns
        self.is_on = config.history_bytes > 0
        self._gaps = ToolGaps(config.tool_gap_seconds)
        self._clock = clock
        self.num_prompts: dict[str, int] = dict.fromkeys(HistoryOutcome, 0)
        self._remembered = RememberedHistory(config.history_bytes)
        self.store = sync
        self._sharing = None if sync is None else HistorySharing(sync, self._remembered)

    @classmethod
    def open(cls, context: ApiContext, secret: ClusterSecret | None) -> "ChatHistory":
        """`secret` is None if no other router has it, nor this one when it is started again."""
        config = context.config
        if secret is None or not config.history_bytes or not config.all_history_bytes:
            return cls(context)
        bounds = HistoryBounds(num_bytes=config.all_history_bytes, seconds=config.history_seconds)
        redis = RedisHistory(config.redis_url, secret, bounds)
        return cls(context, HistorySync(redis, config.history_wait_seconds))

    async def encoded(self, request: ApiRequest, model: ServedModel, chat: PreparedChat) -> PreparedChat:
        caller, history = request.caller, chat.prompt.history
        if history is None or not self.is_on:
            return chat
        root = model.root(caller.owner, chat.request.cache_salt)
        begun = self._begin(root, history)
        last, found = history.last_answer, begun.found
        if self._sharing is not None and last is not None and (found is None or found.position < last):
            sought = Sought(
                model,
                caller,
                tenant_label(caller, model, chat.request.cache_salt),
                chat.prompt,
                begun.keys,
                0 if found is None else found.position + 1,
                chat.request.tools or (),
            )
            if await self._sharing.fetch(sought, self._turns.long_work()):
                begun = self._begin(root, history)
        prompt, turn = _go_on(model, chat, history, begun)
        request.state[self] = turn
        token_ids = chat.token_ids if prompt is chat.prompt else prompt.ids()
        return chat._replace(prompt=prompt, token_ids=token_ids, is_remembered=True)

    def prepared(self, request: ApiRequest, body: bytes) -> None:
        turn: Turn | None = request.state.get(self)
        if turn is None:
            return
        self.count(turn)
        (prompt,) = request.prompts
        seconds = self._gaps.seconds(prompt.generation.tenant) if turn.may_call else None
        if seconds is not None and not prompt.wished_leases:
            prompt.keep_for(seconds, request.model.card.block_size)

    def answered(self, request: ApiRequest) -> None:
        turn: Turn | None = request.state.get(self)
        if turn is not None:
            (prompt,) = request.prompts
            self.remember(turn, prompt.generation, prompt.outputs)

    @property
    def num_records(self) -> int:
        return self._remembered.num_records

    def instruments(self) -> Iterator[Instrument]:
        yield from self._remembered.instruments()
        yield counter(
            "router_history_prompts_total",
            "Prompts of conversations with an earlier answer, by how they go on from its tokens: exact (the "
            "template would have written the same), drifted (it would have written others), unknown (the "
            "answer is not remembered), retold (it came with other reasoning than was generated), refused "
            "(what follows it cannot be told, or leaves no room)",
            lambda: self.num_prompts,
            "outcome",
        )

    def _begin(self, root: bytes, history: EncodedHistory) -> Begun:
        """Continue a conversation from this router's memory. Only the tenant's own answers are found: they
        may contain reasoning that no client was shown."""
        keys, retold = self._keys(root, history)
        found = None
        if history.last_answer is not None:
            found = self._remembered.find(keys[: history.last_answer + 1])
        return Begun(root, keys, retold, found)

    def _keys(self, root: bytes, history: EncodedHistory) -> tuple[list[ConversationKey], int | None]:
        """Return the keys of the messages, and the position of the last answer that came back with different
        reasoning, if any."""
        retold: int | None = None

        def is_other(position: int, key: ConversationKey, thought: Thought) -> bool:
            nonlocal retold
            if not self._remembered.is_other(key, thought):
                return False
            retold = position
            return True

        digests = cast("list[Digest]", history.digests)
        thoughts = cast("dict[int, Thought]", history.thoughts)
        return conversation_keys(root, digests, thoughts, is_other), retold

    def count(self, turn: Turn) -> None:
        """A request that is to be served."""
        if turn.outcome is not None:
            self.num_prompts[turn.outcome] += 1
        if turn.answered is not None:
            self._gaps.came(turn.answered, self._clock())

    def remember(self, turn: Turn, generation: Generation, outputs: Sequence[ChoiceOutput]) -> None:
        """The answers to a prompt, once they are whole."""
        if generation.sampling.ignore_eos:
            return
        num_before = 0 if turn.parent is None else len(turn.parent.token_ids)
        asked = generation.submit.packed_tokens[num_before:]
        for output in outputs:
            in_calls = output.finish_reason == TOOL_CALLS
            text, calls = output.text, output.calls
            is_whole = _can_be_sent_back(output, has_text=bool(text.strip()), has_calls=bool(calls))
            if not (is_whole or in_calls):
                continue
            answer = {
                "role": "assistant",
                "content": text,
                "tool_calls": [
                    {"function": {"name": call.name, "arguments": call.arguments}} for call in calls
                ],
            }
            key = key_after(turn.root, turn.key, message_digest(answer))
            if turn.may_call:
                self._gaps.ended(generation.tenant, key, self._clock(), in_calls=in_calls)
            if not is_whole:
                continue
            said = output.token_ids
            if said[-1] in generation.sampling.stop_token_ids and said[-1] not in turn.ends:
                said = said[:-1]
            self._remembered.remember(
                generation.tenant,
                key,
                asked + pack_token_ids(said),
                turn.parent,
                thought_digest(output.reasoning),
                AskedAnswer(len(asked), turn.may_call, turn.starts_in_reasoning),
            )
            if self._sharing is not None:
                self._sharing.tell(generation.caller.tenant.name, key)


def _go_on(
    model: ServedModel, chat: PreparedChat, history: EncodedHistory, begun: Begun
) -> tuple[EncodedPrompt, Turn]:
    """Return the prompt from remembered tokens on if there are any, and what its answer is remembered by."""
    root, keys, retold, found = begun
    request, encoded = chat.request, chat.prompt
    may_call = bool(request.tools) and request.tool_choice.mode is not ToolMode.NONE
    turn = partial(
        Turn,
        root,
        keys[-1],
        model.eos_token_ids,
        may_call=may_call,
        starts_in_reasoning=encoded.starts_in_reasoning,
    )
    if history.last_answer is None:
        return encoded, turn()
    turn = partial(turn, answered=keys[history.last_answer])
    if found is None:
        return encoded, turn(outcome=HistoryOutcome.UNKNOWN if retold is None else HistoryOutcome.RETOLD)
    tail = chat.tail_of(found.position)
    if tail is None:
        return encoded, turn(outcome=HistoryOutcome.REFUSED)
    token_ids = _joined(found, tail, model.eos_token_ids)
    if not _has_room(model, request, encoded, token_ids):
        return encoded, turn(outcome=HistoryOutcome.REFUSED)
    is_before = retold is not None and found.position < retold
    if token_ids == encoded.token_ids:
        return encoded, turn(
            parent=found, outcome=HistoryOutcome.RETOLD if is_before else HistoryOutcome.EXACT
        )
    spliced = msgspec.structs.replace(
        encoded, token_ids=token_ids, keeps=_moved(encoded.keeps, encoded, tail, token_ids)
    )
    return spliced, turn(parent=found, outcome=HistoryOutcome.RETOLD if is_before else HistoryOutcome.DRIFTED)


def _joined(found: Found, tail: EncodedTail, ends: frozenset[int]) -> bytes:
    """Return the remembered tokens and what follows, with the token that ends the turn once between them."""
    last = int.from_bytes(found.token_ids[-BYTES_PER_TOKEN:], "little")
    end = b"" if last in ends else pack_token_ids([tail.end])
    return found.token_ids + end + tail.token_ids


def _has_room(model: ServedModel, request: ChatRequest, plain: EncodedPrompt, token_ids: bytes) -> bool:
    length = model.card.context_length
    room = length - len(token_ids) // BYTES_PER_TOKEN
    if request.max_tokens is not None and not request.cut_to_context:
        return room >= request.max_tokens
    plain_room = length - len(plain.token_ids) // BYTES_PER_TOKEN
    return room >= min(plain_room, length * LEAST_ROOM_SHARE, request.max_tokens or length)


def _moved(
    keeps: Sequence[LeaseRequest], plain: EncodedPrompt, tail: EncodedTail, token_ids: bytes
) -> list[LeaseRequest]:
    """Places behind the answer are where they were, counted from the end."""
    num_plain = len(plain.token_ids) // BYTES_PER_TOKEN
    shift = len(token_ids) // BYTES_PER_TOKEN - num_plain
    begin = num_plain - len(tail.token_ids) // BYTES_PER_TOKEN
    return [
        keep
        if keep.num_tokens is None or keep.num_tokens < begin
        else keep._replace(num_tokens=keep.num_tokens + shift)
        for keep in keeps
    ]


def _can_be_sent_back(output: ChoiceOutput, *, has_text: bool, has_calls: bool) -> bool:
    if output.was_stopped or not output.token_ids:
        return False
    return output.finish_reason in (STOP, TOOL_CALLS, LENGTH) and (has_calls or has_text)
