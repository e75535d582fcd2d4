"""Offload: large bodies are prepared, and grammars worked out, beside the event loop.

Owns the process that does it (`router/api/preparing_process.py`). `PLACES` bodies are worked on,
`MOST_WAITING` wait, for `WAIT_SECONDS` at most, in a line that no address fills.

The process is started when it is first needed, and again if it has died.
"""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec

from replicas.protocol.status import TokenizerBundle
from router.answers.grammar_check import CheckedGrammar, WishedGrammar
from router.errors import InvalidRequest, RouterBusy
from router.prepared import (
    GRAMMAR,
    LENGTH,
    LOAD,
    PREPARE,
    Bounds,
    CrashedJob,
    Digest,
    GrammarOutcome,
    LoadTextSide,
    ModelWindow,
    Outcome,
    PrepareJob,
    RefusedRequest,
)
from router.prompt.catalog import ModelCatalog
from router.prompt.template import TemplateVerdict
from router.shared.fair_places import FairPlaces, NoPlace
from router.shared.instruments import Instrument, counter, gauge

PLACES = 2
MOST_WAITING = 64
WAIT_SECONDS = 10.0
RETRY_SECONDS = 2.0

READ_BYTES = 256 * 2**10
CLOSE_SECONDS = 5.0


class _Hung(Exception):
    """The other end has closed its socket."""


class Offload:
    """For one event loop. `close()` when no request is left."""

    def __init__(
        self,
        catalog: ModelCatalog,
        *,
        max_choices: int,
        max_prompts: int,
        has_history: bool = True,
        address_share: float = 1.0,
        bounds: Bounds | None = None,
    ) -> None:
        self._bounds = bounds or Bounds()
        self._catalog = catalog
        self._max_choices = max_choices
        self._max_prompts = max_prompts
        self._has_history = has_history
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._verdicts: dict[Digest, TemplateVerdict] = {}
        self._starting = asyncio.Lock()
        self._places = FairPlaces(
            num_places=PLACES,
            most_waiting=MOST_WAITING,
            wait_seconds=WAIT_SECONDS,
            owner_share=address_share,
        )
        self.num_done = self.num_ended = self.num_refused = 0

    async def prepare(self, kind: str, body: bytes, address: str | None = None) -> Outcome:
        """Raises what is wrong with the request; RouterBusy where there are too many of its kind, of its
        client's address or of all; NoReplicaAvailable while no model is known."""
        self._catalog.check_known()
        try:
            async with self._places.place(address):
                outcome = await self._prepare(kind, body)
        except NoPlace as error:
            raise self._refused() from error
        _raise_if_failed(outcome, "a request body could not be prepared")
        return outcome

    async def work_out(self, wished: WishedGrammar) -> CheckedGrammar:
        """Raises InvalidRequest for what cannot be followed or takes more than it may, and RouterBusy. How
        many do so at once the caller sees to."""
        async with self._starting:
            await self._ensure_running()
        began = time.monotonic()
        try:
            answer = await self._ask(GRAMMAR, msgspec.msgpack.encode(wished))
        except _Hung as error:
            bounds = self._bounds.of_grammar()
            is_dead = not self._is_running()
            if is_dead:
                self._forget()
            if is_dead or time.monotonic() - began >= bounds.seconds:  # for want of processor time
                raise RouterBusy(
                    "The schema or grammar could not be worked out in time. Please try again.",
                    retry_after_seconds=RETRY_SECONDS,
                ) from error
            raise InvalidRequest(
                f"the answer cannot be held to this: working it out takes more than {bounds}",
                parameter=wished.parameter or None,
            ) from error
        outcome: GrammarOutcome = msgspec.msgpack.decode(answer, type=GrammarOutcome)
        _raise_if_failed(outcome, "a grammar could not be worked out")
        assert isinstance(outcome, CheckedGrammar)
        return outcome

    async def try_out(self, digest: bytes, bundle: TokenizerBundle) -> TemplateVerdict:
        """Whether the bundle's chat template comes to an end. Its bodies can be prepared from then on."""
        async with self._starting:
            return await self._load(Digest(digest), bundle)

    @property
    def num_working(self) -> int:
        return self._places.num_working

    @property
    def num_waiting(self) -> int:
        return self._places.num_waiting

    def instruments(self) -> Iterator[Instrument]:
        yield gauge(
            "router_large_bodies",
            "Large bodies that are being prepared in a helper process",
            lambda: self.num_working,
        )
        yield gauge(
            "router_large_bodies_waiting",
            "Large bodies that wait for the helper process",
            lambda: self.num_waiting,
        )
        yield counter(
            "router_large_bodies_total",
            "Large bodies by outcome: done, ended (too much time or memory), or refused (too many "
            "were waiting)",
            lambda: {"done": self.num_done, "ended": self.num_ended, "refused": self.num_refused},
            "outcome",
        )

    async def close(self) -> None:
        self._forget()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(_end, process)

    def _refused(self) -> RouterBusy:
        self.num_refused += 1
        return RouterBusy(
            "The router has as many large requests to read as it can."
            f" Please try again in {RETRY_SECONDS:g}s.",
            retry_after_seconds=RETRY_SECONDS,
        )

    async def _prepare(self, kind: str, body: bytes) -> Outcome:
        windows = self._windows()
        await self._load_all()
        job = PrepareJob(kind, self._max_choices, self._max_prompts, self._has_history, windows)
        try:
            answer = await self._ask(PREPARE, msgspec.msgpack.encode(job), body)
        except _Hung as error:
            if not self._is_running():
                self._forget()
                raise self._refused() from error
            self.num_ended += 1
            raise InvalidRequest(
                f"The request cannot be prepared: reading and tokenising it takes more than {self._bounds}.",
                code="too_much_work",
            ) from error
        self.num_done += 1
        outcome: Outcome = msgspec.msgpack.decode(answer, type=Outcome)
        return outcome

    def _windows(self) -> dict[str, ModelWindow]:
        catalog = self._catalog
        adapters = set(catalog.adapter_names())
        names = [*catalog.names(), *adapters]
        found: dict[str, ModelWindow] = {}
        for name in names:
            card = catalog.get(name).card
            digest = Digest(catalog.bundle_of(card.name)[0])
            found[name] = ModelWindow(
                digest,
                card.context_length,
                card.vocab_size,
                card.eos_token_ids,
                name in adapters,
                card.image_rule,
            )
        return found

    async def _load_all(self) -> None:
        bundles = [self._catalog.bundle_of(name) for name in self._catalog.names()]
        if self._is_running() and all(digest in self._verdicts for digest, _ in bundles):
            return
        async with self._starting:
            for digest, bundle in bundles:
                await self._load(Digest(digest), bundle)

    def _is_running(self) -> bool:
        """Whether it runs; a process that has hung up is ending."""
        return self._control is not None and self._process is not None and self._process.poll() is None

    async def _ensure_running(self) -> None:
        """Only one at a time may start it: the caller holds `_starting`."""
        if not self._is_running():
            self._forget()
            await self._start()

    async def _load(self, digest: Digest, bundle: TokenizerBundle) -> TemplateVerdict:
        """Once per digest and process."""
        await self._ensure_running()
        verdict = self._verdicts.get(digest)
        if verdict is None:
            load = msgspec.msgpack.encode(LoadTextSide(digest, dict(bundle.files)))
            try:
                answer = await self._ask(LOAD, load)
            except _Hung as error:
                self._forget()
                raise self._refused() from error
            verdict = self._verdicts[digest] = msgspec.msgpack.decode(answer, type=TemplateVerdict)
        return verdict

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._control = ours
        with theirs:
            self._process = await asyncio.to_thread(_start_process, theirs.fileno(), self._bounds)

    def _forget(self) -> None:
        """The process ends when its control socket is closed."""
        control, self._control = self._control, None
        self._verdicts.clear()
        if control is not None:
            control.close()

    async def _ask(self, kind: bytes, *messages: bytes) -> bytes:
        """Raises _Hung."""
        assert self._control is not None
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            try:
                with theirs:
                    socket.send_fds(self._control, [kind], [theirs.fileno()])
                for message in messages:
                    await loop.sock_sendall(ours, LENGTH.pack(len(message)))
                    await loop.sock_sendall(ours, message)
                (length,) = LENGTH.unpack(await _receive(ours, LENGTH.size))
                return await _receive(ours, length)
            except OSError as error:
                raise _Hung from error


async def _receive(peer: socket.socket, length: int) -> bytes:
    loop = asyncio.get_running_loop()
    parts: list[bytes] = []
    while length:
        part = await loop.sock_recv(peer, min(length, READ_BYTES))
        if not part:
            raise _Hung
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _raise_if_failed(outcome: Outcome | GrammarOutcome, what: str) -> None:
    match outcome:
        case RefusedRequest():
            raise outcome.error()
        case CrashedJob():
            raise RuntimeError(f"{what}:\n{outcome.traceback}")


def _start_process(handle: int, bounds: Bounds) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "router.api.preparing_process",
            str(handle),
            msgspec.json.encode(bounds),
        ],
        pass_fds=[handle],
        stdin=subprocess.DEVNULL,
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
