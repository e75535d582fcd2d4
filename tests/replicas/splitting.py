"""Splits between two replicas, and the same requests undivided: random ones, for every engine."""

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from replicas.host import ReplicaHost
from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import (
    Abort,
    FinishReason,
    PromptUsage,
    RequestKey,
    SamplingParams,
    Submit,
    TokenDelta,
)
from replicas.protocol.pulls import PullHint
from tests.replicas.grammar_contract import CITY
from tests.replicas.router_client import RouterClient, submit

if TYPE_CHECKING:
    from replicas.kvstore.store import ChunkStore

CHUNK = 128
WAIT_SECONDS = 50.0
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Answer:
    """One choice."""

    tokens: list[int]
    finish_reason: FinishReason | None
    logprobs: list[Any]


class Side:
    """One replica of a split, and its router's stream."""

    def __init__(self, host: ReplicaHost, client: RouterClient) -> None:
        self.host = host
        self.client = client

    def hint(self, num_tokens: int, **other: Any) -> PullHint:
        record = self.host.record()
        return replace(PullHint(record.replica_id, record.epoch, record.address, num_tokens), **other)

    def metric(self, name: str, **labels: str) -> float:
        assert self.host._parts is not None
        return self.host._parts.metrics.registry.get_sample_value(name, labels) or 0.0

    @property
    def has_open_splits(self) -> bool:
        return bool(self.metric("replica_open_splits") or self.metric("replica_waiting_pulls"))

    async def send(self, asked: Submit) -> Submit:
        """Under a number of its own."""
        numbered = replace(asked, submit_id=next(_numbers))
        await self.client.send(numbered)
        return numbered

    async def abort(self, asked: Submit) -> None:
        await self.client.send(Abort(asked.submit_id))

    async def answers(self, *asked: Submit) -> list[tuple[list[Answer], PromptUsage]]:
        """Of requests that were sent before, each with the usage of its first choice."""
        keys = [(each.submit_id, choice) for each in asked for choice in range(each.num_choices)]
        found = await self.client.finish(*keys)
        answers: list[tuple[list[Answer], PromptUsage]] = []
        for each in asked:
            choices = [found[RequestKey(each.submit_id, choice)] for choice in range(each.num_choices)]
            refused = [delta.refusal for deltas in choices for delta in deltas if delta.refusal]
            assert not refused, refused
            (usage,) = [delta.usage for delta in choices[0] if delta.usage is not None]
            answers.append(([_answer(deltas) for deltas in choices], usage))
        return answers

    async def ask(self, *asked: Submit) -> list[tuple[list[Answer], PromptUsage]]:
        return await self.answers(*[await self.send(each) for each in asked])


def _answer(deltas: Sequence[TokenDelta]) -> Answer:
    return Answer(
        [token for delta in deltas for token in delta.token_ids],
        deltas[-1].finish_reason,
        [each for delta in deltas for each in delta.logprobs or ()],
    )


def first_part(asked: Submit, split_id: int) -> Submit:
    """What a router sends to the prefiller."""
    once = SamplingParams(max_tokens=1, ignore_eos=True)
    return replace(asked, sampling=once, num_choices=1, split_id=split_id, pull=None, leases=())


def second_part(asked: Submit, there: Side, split_id: int, **other: Any) -> Submit:
    """And to the decoder."""
    fields = {"wait_seconds": WAIT_SECONDS, "split_id": split_id, **other}
    return replace(asked, pull=there.hint(asked.num_tokens // CHUNK * CHUNK, **fields))


def new_root() -> BlockHash:
    """Under which nothing was computed before."""
    return BlockHash(b"split" + next(_numbers).to_bytes(11, "big"))


def new_split() -> int:
    return 2**63 + next(_numbers)


def prompt_of(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(3, 500) for _ in range(num_tokens)]


def greedy(tokens: Sequence[int], max_tokens: int = 6, **fields: Any) -> Submit:
    asked = submit(1, tokens, max_tokens=max_tokens)
    sampling = replace(asked.sampling, temperature=0.0, num_logprobs=0)
    return replace(asked, root=new_root(), sampling=sampling, **fields)


def random_request(rng: random.Random, max_tokens: int, adapters: Sequence[str] = ()) -> Submit:
    some = [1, 127, 128, 129, 255, 256, 257, 513, *(rng.randrange(2, max_tokens) for _ in range(8))]
    asked = submit(1, prompt_of(rng, rng.choice(some)), num_choices=rng.choice((1, 1, 1, 2, 3)))
    with_grammar = rng.random() < 0.2
    sampling = SamplingParams(
        max_tokens=60 if with_grammar else rng.randrange(1, 24),
        temperature=rng.choice((0.0, 0.0, 0.7, 1.2)),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 20)),
        seed=rng.getrandbits(48),
        is_seeded=True,
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.4)),
        stop_token_ids=tuple(rng.sample(range(3, 500), rng.choice((0, 0, 60)))),
        ignore_eos=rng.random() < 0.5,
        num_logprobs=rng.choice((None, 0, 3)),
        grammar=CITY if with_grammar else "",
    )
    adapter = rng.choice((None, *adapters))
    return replace(asked, sampling=sampling, root=new_root(), adapter=adapter)


@dataclass
class Tally:
    num: int = 0
    num_pulled_tokens: int = 0
    num_lost_tokens: int = 0
    num_to_the_bit: int = 0


async def compare(
    there: Side, here: Side, rng: random.Random, num_requests: int, make: Callable[[], Submit], tally: Tally
) -> None:
    """Split so many requests at once, ask the same ones undivided, and compare.

    An engine's last bits depend on the size of its steps. So log-probabilities are compared to the bit for a
    request that is alone, with one that finds as much of its prompt on the device.
    """
    asked = [make() for _ in range(num_requests)]
    is_alone = num_requests == asked[0].num_choices == 1 and rng.random() < 0.5
    for each in () if is_alone else asked:
        for side in (there, here):
            num_tokens = rng.choice((0, 0, rng.randrange(each.num_tokens), each.num_tokens))
            if num_tokens:
                await side.ask(_beginning(each, num_tokens))
    splits = [new_split() for _ in asked]
    firsts = [first_part(each, split) for each, split in zip(asked, splits, strict=True)]
    seconds = [second_part(each, there, split) for each, split in zip(asked, splits, strict=True)]
    parts = [(there, firsts), (here, seconds)]
    sent: dict[Side, list[Submit]] = {}
    for side, each_part in rng.sample(parts, 2):
        sent[side] = [await side.send(part) for part in each_part]
    split, _ = await asyncio.gather(here.answers(*sent[here]), there.answers(*sent[there]))
    alone = [replace(each, root=new_root()) for each in asked]
    if is_alone and (num_cached := split[0][1].num_cached_tokens):
        await here.ask(_beginning(alone[0], num_cached))
    undivided = await here.ask(*alone)
    for each, (answers, usage), (expected, _) in zip(asked, split, undivided, strict=True):
        tally.num += 1
        tally.num_pulled_tokens += usage.num_pulled_tokens
        tally.num_lost_tokens += usage.num_lost_tokens
        for answer, other in zip(answers, expected, strict=True):
            what = (each.num_tokens, each.sampling, usage)
            assert (answer.tokens, answer.finish_reason) == (other.tokens, other.finish_reason), what
            pairs = [*zip(answer.logprobs, other.logprobs, strict=True)]
            assert all(abs(one.logprob - another.logprob) < 1e-3 for one, another in pairs), what
            if is_alone:
                tally.num_to_the_bit += 1
                assert answer.logprobs == other.logprobs, what


def _beginning(asked: Submit, num_tokens: int) -> Submit:
    once = SamplingParams(max_tokens=1, ignore_eos=True)
    packed = asked.packed_tokens[: 4 * num_tokens]
    return replace(asked, packed_tokens=packed, sampling=once, num_choices=1)


def is_at_rest(store: "ChunkStore") -> bool:
    """Whether no slot is being filled or read, and nothing is pulled or waited for."""
    pulls, directory = store._pulls, store.directory
    assert pulls is not None
    chunks = list(directory._chunks.values())
    return (
        not (pulls._num_slots or pulls._bindings or pulls._binding_slots)
        and not (pulls._puller._transfers or directory.num_quarantined)
        and not any(chunk.is_filling or chunk.num_readers for chunk in chunks)
        and directory.num_in_host + len(directory._free_slots) == directory.num_host_slots
        and not any(each.num_calls for each in pulls._puller._peers._connections.values())
    )
