"""Retracing: a remembered answer as other routers get it, and how they find its prompt in their own.

Owns the record that routers exchange. It holds a hash of the prompt and its last few tokens, never the text:
a client that continues a conversation sends all of it again, and the template renders it as before, except
the answers. So the tokens of each earlier prompt are taken from the new prompt, in order, and from its end,
where a template writes what begins an answer. A record can thus add only answers to a prompt;
`features/history/sharing.py` checks that they are those of the conversation.
"""

import hashlib

import msgspec

from router.history.remembered import AskedAnswer, Mark

BYTES_PER_TOKEN = 4
ENDING_TOKENS = 32
"""Sent in plain: they include the beginning of an answer, which occurs only there."""
ANCHOR_TOKENS = 16
"""Sent in plain, to search for the place of the rest."""
LEAST_ANCHOR_TOKENS = 4
MOST_PLACES = 64
"""Places tried for one prompt, before it counts as not found."""
MOST_READINGS = 4
"""Bound on the bytes that are hashed to find all earlier prompts, as a multiple of the whole prompt."""
DIGEST_BYTES = 16


class HistoryRecord(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An answer, and its prompt behind the conversation of `parent` (empty: the whole prompt). The prompt is
    `num_hashed` tokens with this digest, which begin with the `anchor`, followed by the `ending`. `written`
    is in seconds since 1970 by the clock of the router that wrote it."""

    parent: bytes
    written: int
    anchor: bytes
    num_hashed: int
    digest: bytes
    ending: bytes
    said: bytes
    may_call: bool
    starts_in_reasoning: bool

    @property
    def mark(self) -> Mark:
        whole = hashlib.sha256(len(self.parent).to_bytes() + self.parent)
        whole.update(self.digest + len(self.ending).to_bytes(4) + self.ending + self.said)
        return Mark(whole.digest()[:DIGEST_BYTES])

    @property
    def is_well_formed(self) -> bool:
        parts = (self.anchor, self.ending, self.said)
        return (
            all(len(part) % BYTES_PER_TOKEN == 0 for part in parts)
            and bool(self.said)
            and len(self.parent) in (0, DIGEST_BYTES)
            and len(self.ending) <= ENDING_TOKENS * BYTES_PER_TOKEN
            and len(self.anchor) <= min(self.num_hashed, ANCHOR_TOKENS) * BYTES_PER_TOKEN
            and bool(self.anchor) == (self.num_hashed > 0)
        )


def record_of(added: bytes, asked: AskedAnswer, parent: Mark | None, written: int) -> HistoryRecord:
    """Make one from a record's content."""
    prompt, said = added[: asked.num_bytes], added[asked.num_bytes :]
    cut = max(0, len(prompt) - ENDING_TOKENS * BYTES_PER_TOKEN)
    return HistoryRecord(
        parent=parent or b"",
        written=written,
        anchor=prompt[: min(cut, ANCHOR_TOKENS * BYTES_PER_TOKEN)],
        num_hashed=cut // BYTES_PER_TOKEN,
        digest=_digest(prompt[:cut]),
        ending=prompt[cut:],
        said=said,
        may_call=asked.may_call,
        starts_in_reasoning=asked.starts_in_reasoning,
    )


class Retracing:
    """Walks through one rendered prompt, from one answer to the next."""

    def __init__(self, plain: bytes) -> None:
        self._plain = plain
        self._place = 0
        self._left = MOST_READINGS * len(plain)

    def prompt_of(self, record: HistoryRecord) -> bytes | None:
        """Return the packed tokens of the answer's prompt, after the answer before it. None if they are not
        found; do not call it again then."""
        if not record.parent:
            return self._at(record, 0)
        anchor = record.anchor or record.ending[: LEAST_ANCHOR_TOKENS * BYTES_PER_TOKEN]
        place = self._place - 1
        for _ in range(MOST_PLACES):
            place = self._plain.find(anchor, place + 1)
            if place < 0:
                return None
            if place % BYTES_PER_TOKEN == 0 and (prompt := self._at(record, place)) is not None:
                return prompt
        return None

    def _at(self, record: HistoryRecord, place: int) -> bytes | None:
        end = place + record.num_hashed * BYTES_PER_TOKEN
        self._left -= end - place
        if end > len(self._plain) or self._left < 0 or _digest(self._plain[place:end]) != record.digest:
            return None
        num_alike = _num_alike(record.ending, self._plain[end : end + len(record.ending)])
        if not self._plain.endswith(record.ending[num_alike:]):
            return None
        self._place = end + num_alike
        return self._plain[place:end] + record.ending


def _num_alike(one: bytes, other: bytes) -> int:
    """Bytes of whole tokens with which both begin."""
    for place in range(0, len(one), BYTES_PER_TOKEN):
        if one[place : place + BYTES_PER_TOKEN] != other[place : place + BYTES_PER_TOKEN]:
            return place
    return len(one)


def _digest(tokens: bytes) -> bytes:
    return hashlib.sha256(tokens).digest()[:DIGEST_BYTES]
