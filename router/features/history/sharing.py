"""HistorySharing: a conversation's answers from other routers, or from this one before a restart.

Owns the check of such a record. Its answer's tokens must read as the very message that the conversation has
at that place. All other tokens are this router's own, found in the prompt that its template renders. A record
that does not fit is skipped and counted; the conversation then counts as unknown.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from replicas.protocol.blocks import unpack_token_ids
from router.answers.parser import Tools, new_parser
from router.answers.parts import CallArguments, CallStart, Part, Reasoning, Text
from router.caller import Caller
from router.encoded import EncodedPrompt
from router.features.history.history_sync import HistorySync
from router.features.history.redis_history import OutgoingRecord
from router.history.canonical import ConversationKey, Digest, Thought, message_digest, thought_digest
from router.history.remembered import AskedAnswer, Mark, RememberedHistory
from router.history.retracing import HistoryRecord, Retracing, record_of
from router.prompt.catalog import ServedModel
from router.turns import LongWork

MOST_ANSWERS = 256
"""Per conversation; the last ones are asked for."""
RENEW_SHARE = 0.5
"""A record in use is sent again after this part of its lifetime."""


class Sought(NamedTuple):
    """A conversation that is partly known. `tenant` is the one whose memory it takes here; `num_known` counts
    the messages through the last remembered answer."""

    model: ServedModel
    caller: Caller
    tenant: str
    encoded: EncodedPrompt
    keys: Sequence[ConversationKey]
    num_known: int
    tools: Tools


class _HeardRecord(NamedTuple):
    """`parent` is the key of the answer before it."""

    key: ConversationKey
    position: int
    record: HistoryRecord
    parent: ConversationKey | None


class HistorySharing:
    """For one event loop. Times are the clock's of `sync`, and seconds since 1970."""

    def __init__(
        self,
        sync: HistorySync,
        remembered: RememberedHistory,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.sync = sync
        self._remembered = remembered
        self._clock, self._wall_clock = clock, wall_clock

    def tell(self, tenant: str, key: ConversationKey) -> None:
        """Tell others of an answer that was just remembered, and again of those before it that were told long
        ago. `tenant` is the one whose room in Redis it takes."""
        now = self._clock()
        since = max(self.sync.lost_at, now - RENEW_SHARE * self.sync.seconds)
        chain = self._remembered.chain(key)
        if any(record.asked is None for _, record in chain):
            return
        before: Mark | None = None
        for used, record in chain:
            if record.told_at is None or record.told_at <= since or record.mark is None:
                assert record.asked is not None
                sent = record_of(record.added, record.asked, before, int(self._wall_clock()))
                record.mark, record.told_at = sent.mark, now
                self.sync.send(OutgoingRecord(tenant, used, sent))
            before = record.mark

    async def fetch(self, sought: Sought, work: LongWork) -> bool:
        """Fetch and remember records of it. Whether more is known than before."""
        history = sought.encoded.history
        assert history is not None
        tenant = sought.caller.tenant.name
        positions = [place for place in history.answers if place >= sought.num_known][-MOST_ANSWERS:]
        keys = [sought.keys[place] for place in positions]
        answers = await self.sync.fetch(tenant, keys)
        chain = self._linked(sought, positions, answers)
        if not chain:
            unused = [key for key, record in zip(keys, answers, strict=True) if record is not None]
            self.sync.pass_over(tenant, unused)
            return False
        retracing = Retracing(sought.encoded.token_ids)
        has_more = False
        for heard in chain:
            if not self._adopt(sought, heard, retracing):
                self.sync.pass_over(tenant, [heard.key], is_wrong=True)
                break
            has_more = True
            await work.give_way()
        return has_more

    def _linked(
        self, sought: Sought, positions: Sequence[int], answers: Sequence[HistoryRecord | None]
    ) -> list[_HeardRecord]:
        """Return the last record that continues nothing, others, or an answer that is remembered here, and
        before it those that it needs."""
        chains: dict[bytes, list[_HeardRecord]] = {}
        longest: list[_HeardRecord] = []
        for position, record in zip(positions, answers, strict=True):
            if record is None:
                continue
            before = chains.get(record.parent) if record.parent else []
            parent = before[-1].key if before else None
            if before is None:
                parent = self._known(sought, Mark(record.parent))
                before = []
                if parent is None:
                    continue
            heard = _HeardRecord(sought.keys[position], position, record, parent)
            longest = chains[record.mark] = [*before, heard]
        return longest

    def _known(self, sought: Sought, mark: Mark) -> ConversationKey | None:
        history = sought.encoded.history
        assert history is not None
        before = (sought.keys[place] for place in reversed(history.answers) if place < sought.num_known)
        return next((key for key in before if self._remembered.holds(key, mark)), None)

    def _adopt(self, sought: Sought, heard: _HeardRecord, retracing: Retracing) -> bool:
        """Remember the record. False if it does not fit the conversation, or there is no room."""
        record, model = heard.record, sought.model
        assert sought.encoded.history is not None
        thought = said_thought(
            model, record, sought.encoded.history.digests[heard.position + 1], sought.tools
        )
        prompt = None if thought is None else retracing.prompt_of(record)
        if prompt is None or len(prompt) + len(record.said) > 4 * model.card.context_length:
            return False
        age = max(0.0, self._wall_clock() - record.written)
        return self._remembered.adopt(
            sought.tenant,
            heard.key,
            prompt + record.said,
            heard.parent,
            thought,
            AskedAnswer(len(prompt), record.may_call, record.starts_in_reasoning),
            record.mark,
            self._clock() - age,
        )


def said_thought(model: ServedModel, record: HistoryRecord, digest: bytes, tools: Tools) -> Thought | None:
    """Return the answer's reasoning, if its tokens read as the message of this digest; else None."""
    token_ids = unpack_token_ids(record.said)
    if max(token_ids) >= model.card.vocab_size or len(token_ids) > model.card.context_length:
        return None
    is_whole = token_ids[-1] in model.eos_token_ids
    if is_whole:
        token_ids.pop()
    answer_format = model.answer_format
    wants_calls = record.may_call and answer_format.tools is not None
    parser = new_parser(
        answer_format, wants_calls=wants_calls, starts_in_reasoning=record.starts_in_reasoning, tools=tools
    )
    shown = frozenset[str]() if parser is None else answer_format.marks(wants_calls=wants_calls)
    detokenizer = model.tokenizer.new_detokenizer(shown)
    text = detokenizer.add(token_ids) + detokenizer.finish()
    parts: list[Part] = (
        [Text(text)] if parser is None else [*parser.feed(text), *parser.finish(is_whole=is_whole)]
    )
    calls: list[dict[str, str]] = []
    for part in parts:
        if type(part) is CallStart:
            calls.append({"name": part.name, "arguments": ""})
        elif type(part) is CallArguments:
            calls[-1]["arguments"] += part.text
    message = {
        "role": "assistant",
        "content": "".join(part.text for part in parts if type(part) is Text),
        "tool_calls": [{"function": call} for call in calls],
    }
    if message_digest(message) != cast("Digest", digest):
        return None
    return thought_digest("".join(part.text for part in parts if type(part) is Reasoning))
