"""Suspects: prompts that may kill replicas.

Owns the memory of them, under digests that only this process can make, and the trials in progress. Deaths and
times are arguments.

    a replica dies with a suspect on trial  that prompt alone is blamed
    else                                    every prompt that was new to the replica: it may have been in
                                            its last step
    else, with few requests in flight       each of them
    else                                    none: a prompt that many survived for many steps is innocent

A prompt blamed once is tried once more, with no other suspect at that replica, and is cleared when it
survives a few tokens there. A prompt blamed twice is refused until the memory of it expires; while replicas
also die without it, three times.

A death counts half against a prompt that the replica had not acknowledged. It was probably sent to a process
that had already died; but a crash may also be faster than the acknowledgement.
"""

import enum
import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType

from replicas.protocol.status import ReplicaId
from router.shared.instruments import Instrument, counter, gauge

PromptDigest = NewType("PromptDigest", bytes)

HEARD_STRIKE = 2
UNHEARD_STRIKE = 1
CONDEMNING_STRIKES = 2 * HEARD_STRIKE
CONDEMNING_STRIKES_IN_A_STORM = 3 * HEARD_STRIKE
STORM_DEATHS = 2
STORM_SECONDS = 60.0
"""After this many other deaths in this time, which no prompt explains, something else kills replicas."""

SURVIVED_TOKENS = 4
"""A prompt is new to a replica until each of its choices has got this many tokens from it."""

MAX_FEW = 4
"""If no prompt was new, each request is suspected when at most this many are in flight."""

NUM_STEPS_UNHEARD = 2
"""How many steps at most a replica had begun, when it died, without the router having heard of them."""

MEMORY_SECONDS = 600.0
MAX_REMEMBERED = 8192


class Standing(enum.Enum):
    CLEAR = enum.auto()
    SUSPECT = enum.auto()
    CONDEMNED = enum.auto()


@dataclass(frozen=True, slots=True)
class Presence:
    """A submission that was in flight at a replica when it died. `num_tokens_out` is that of each choice."""

    num_uncached_tokens: int
    num_tokens_out: int
    is_on_trial: bool = False
    is_heard: bool = True
    """The replica has acknowledged the request."""

    @property
    def is_new(self) -> bool:
        return self.num_tokens_out < SURVIVED_TOKENS


def blamed(presences: Sequence[Presence], max_step_tokens: int) -> list[int]:
    """Positions in `presences`, which are in the order of their sending: that in which they are begun.

    `max_step_tokens` is how many prompt tokens the replica computes in one step; 0 is not known.
    """
    new = [position for position, presence in enumerate(presences) if presence.is_new]
    on_trial = [position for position in new if presences[position].is_on_trial]
    if on_trial:
        return on_trial
    if not new:
        return list(range(len(presences))) if len(presences) <= MAX_FEW else []
    found: list[int] = []
    room = NUM_STEPS_UNHEARD * max_step_tokens
    for position in new:
        presence = presences[position]
        # Without a token, and behind others that fill the steps: it had not been begun.
        if presence.num_tokens_out == 0 and max_step_tokens:
            if room <= 0:
                continue
            room -= max(1, presence.num_uncached_tokens)
        found.append(position)
    return found


class _SuspectRecord(NamedTuple):
    deaths: tuple[int, ...]
    strikes: int
    expires: float
    is_condemned: bool


class Suspects:
    """`key` makes the digests: without it, they do not tell which prompts are remembered."""

    def __init__(
        self, key: bytes, *, seconds: float = MEMORY_SECONDS, max_remembered: int = MAX_REMEMBERED
    ) -> None:
        self._key = key
        self._seconds = seconds
        self._max_remembered = max_remembered
        self._records: OrderedDict[PromptDigest, _SuspectRecord] = OrderedDict()
        self._on_trial: Counter[PromptDigest] = Counter()
        self._places: Counter[ReplicaId] = Counter()
        self.num_condemned = 0
        self._num_deaths = 0
        self._unexplained: dict[int, float] = {}
        """Deaths of late, by number, with their time."""

    @property
    def has_any(self) -> bool:
        return bool(self._records)

    def digest(self, model: str, token_ids: Sequence[int], owner: str | None = None) -> PromptDigest:
        """Identify an owner's prompt, ignoring sampling, number of choices and salt. It is per owner, because
        a refusal would tell others that somebody sent it."""
        digest = hashlib.blake2b(model.encode(), key=self._key, digest_size=16, person=b"kvasir-suspects")
        digest.update(array("Q", token_ids).tobytes())
        if owner is not None:
            digest.update(b"\0owner" + owner.encode())
        return PromptDigest(digest.digest())

    def standing(self, digest: PromptDigest, now: float) -> Standing:
        record = self._records.get(digest)
        if record is None:
            return Standing.CLEAR
        if record.expires <= now:
            del self._records[digest]
            return Standing.CLEAR
        return Standing.CONDEMNED if record.is_condemned else Standing.SUSPECT

    def remaining_seconds(self, digest: PromptDigest, now: float) -> float:
        """For how much longer it is remembered."""
        record = self._records.get(digest)
        return 0.0 if record is None else max(0.0, record.expires - now)

    def blame(self, present: Iterable[tuple[PromptDigest, bool]], now: float) -> None:
        """For one death: each prompt, and whether the replica had acknowledged it.

        A prompt is struck once for it, however many copies were in flight.
        """
        self._num_deaths += 1
        self._unexplained = {
            death: when for death, when in self._unexplained.items() if now - when < STORM_SECONDS
        }
        self._unexplained[self._num_deaths] = now
        heard: dict[PromptDigest, bool] = {}
        for digest, is_heard in present:
            heard[digest] = is_heard or heard.get(digest, False)
        for digest, is_heard in heard.items():
            deaths: tuple[int, ...] = (self._num_deaths,)
            strikes = HEARD_STRIKE if is_heard else UNHEARD_STRIKE
            if self.standing(digest, now) is not Standing.CLEAR:
                record = self._records[digest]
                deaths, strikes = (*record.deaths, *deaths), record.strikes + strikes
            is_condemned = self._is_enough(deaths, strikes)
            self._records[digest] = _SuspectRecord(deaths, strikes, now + self._seconds, is_condemned)
            self._records.move_to_end(digest)
            if is_condemned:
                self.num_condemned += 1
                for death in deaths:
                    self._unexplained.pop(death, None)
        while len(self._records) > self._max_remembered:
            self._records.popitem(last=False)

    def _is_enough(self, deaths: Sequence[int], strikes: int) -> bool:
        is_storm = len(self._unexplained.keys() - set(deaths)) >= STORM_DEATHS
        return strikes >= (CONDEMNING_STRIKES_IN_A_STORM if is_storm else CONDEMNING_STRIKES)

    def survived(self, digest: PromptDigest) -> None:
        """It was tried, and the replica lives."""
        self._records.pop(digest, None)

    # Trials.

    def places_taken(self) -> Collection[ReplicaId]:
        """Replicas that have a suspect on trial and get no other."""
        return self._places.keys()

    def is_on_trial(self, digest: PromptDigest) -> bool:
        return digest in self._on_trial

    def begin_trial(self, digest: PromptDigest, replica_id: ReplicaId) -> "Trial":
        """Until the trial is closed."""
        self._on_trial[digest] += 1
        self._places[replica_id] += 1
        return Trial(self, digest, replica_id)

    def end_trial(self, trial: "Trial") -> None:
        for counts, key in ((self._on_trial, trial.digest), (self._places, trial.replica_id)):
            counts[key] -= 1  # type: ignore[index]
            if not counts[key]:  # type: ignore[index]
                del counts[key]

    @property
    def num_remembered(self) -> int:
        return len(self._records)

    @property
    def num_on_trial(self) -> int:
        return self._on_trial.total()

    def instruments(self) -> Iterator[Instrument]:
        yield gauge(
            "router_suspects",
            "Prompts that are remembered because a replica died while computing them",
            lambda: self.num_remembered,
        )
        yield counter(
            "router_condemned_prompts_total",
            "Prompts that are refused because replicas died while computing them",
            lambda: self.num_condemned,
        )


class Trial:
    """One suspect at one replica. Close it once, however it ends."""

    __slots__ = ("_suspects", "digest", "replica_id")

    def __init__(self, suspects: Suspects, digest: PromptDigest, replica_id: ReplicaId) -> None:
        self._suspects = suspects
        self.digest = digest
        self.replica_id = replica_id

    def close(self) -> None:
        self._suspects.end_trial(self)
