"""Worker: large bodies are prepared, and grammars worked out, in a process beside the event loop.

Owns that process (`worker_process.py`), and its turns: `PLACES` bodies are worked on, `MOST_WAITING` wait,
for `WAIT_SECONDS` at most, in a line that no address fills. It is started when it is first needed, and again
if it has died.
"""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from replicas.protocol.status import TokenizerBundle
from router.answers.grammar_check import CheckedGrammar, WishedGrammar
from router.errors import InvalidRequest, RouterBusy
from router.large_bodies.jobs import (
    GRAMMAR,
    LENGTH,
    LOAD,
    WORK,
    WORK_OUT,
    BodyJob,
    Bounds,
    CrashedJob,
    Digest,
    LoadTextSide,
    ModelWindow,
    Outcome,
    Perform,
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


class Worker:
    """For one event loop. `perform` does the work on a body. `close()` when no request is left."""

    def __init__(
        self,
        catalog: ModelCatalog,
        perform: Perform,
        *,
        max_choices: int,
        max_prompts: int,
        pass_fields: tuple[str, ...] = (),
        address_share: float = 1.0,
        bounds: Bounds | None = None,
    ) -> None:
        self._bounds = bounds or Bounds()
        self._catalog = catalog
        self._perform = perform
        self._max_choices = max_choices
        self._max_prompts = max_prompts
        self._pass_fields = pass_fields
        self.has_history = False
        """Whether to prepare what a conversation is known by."""
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._verdicts: dict[Digest, TemplateVerdict] = {}
        self._starting = asyncio.Lock()
        self.places = FairPlaces(
            num_places=PLACES,
            most_waiting=MOST_WAITING,
            wait_seconds=WAIT_SECONDS,
            owner_share=address_share,
        )
        self.num_done = self.num_ended = self.num_refused = 0

    async def prepare(
        self, kind: str, body: bytes, address: str | None = None, max_context: int | None = None
    ) -> Outcome:
        """Prompts have at most `max_context` tokens. Raises what is wrong with the request; RouterBusy where
        there are too many, of its client's address or of all; NoReplicaAvailable while no model is known."""
        self._catalog.check_known()
        windows = self._windows(max_context)
        job = BodyJob(
            kind, self._max_choices, self._max_prompts, self.has_history, self._pass_fields, windows
        )
        try:
            async with self.places.place(address):
                await self._load_all()
                outcome = await self._ask(WORK, Outcome, msgspec.msgpack.encode(job), body)
        except NoPlace as error:
            raise self._refused() from error
        except _Hung as error:
            if self._has_died():
                raise self._refused() from error
            self.num_ended += 1
            raise InvalidRequest(
                f"The request cannot be prepared: reading and tokenising it takes more than {self._bounds}.",
                code="too_much_work",
            ) from error
        self.num_done += 1
        return _checked(outcome)

    async def work_out(self, wished: WishedGrammar) -> CheckedGrammar:
        """Raises InvalidRequest for what cannot be followed or takes more than it may, and RouterBusy. The
        caller bounds how many do so at once."""
        async with self._starting:
            await self._ensure_running()
        began, bounds = time.monotonic(), self._bounds.of_grammar()
        job = msgspec.msgpack.encode(BodyJob(GRAMMAR))
        try:
            outcome = _checked(await self._ask(WORK_OUT, Outcome, job, msgspec.msgpack.encode(wished)))
        except _Hung as error:
            if self._has_died() or time.monotonic() - began >= bounds.seconds:  # for want of processor time
                raise RouterBusy(
                    "The schema or grammar could not be worked out in time. Please try again.",
                    retry_after_seconds=RETRY_SECONDS,
                ) from error
            raise InvalidRequest(
                f"the answer cannot be held to this: working it out takes more than {bounds}",
                parameter=wished.parameter or None,
            ) from error
        assert isinstance(outcome, CheckedGrammar)
        return outcome

    async def try_out(self, digest: bytes, bundle: TokenizerBundle) -> TemplateVerdict:
        """Whether the bundle's chat template comes to an end. Its bodies can be prepared from then on."""
        async with self._starting:
            return await self._load(Digest(digest), bundle)

    def instruments(self) -> Iterator[Instrument]:
        yield gauge(
            "router_large_bodies",
            "Large bodies that are being prepared in a helper process",
            lambda: self.places.line.num_working,
        )
        yield gauge(
            "router_large_bodies_waiting",
            "Large bodies that wait for the helper process",
            lambda: self.places.line.num_waiting,
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

    def _windows(self, max_context: int | None) -> dict[str, ModelWindow]:
        catalog = self._catalog
        own = set(catalog.names())
        found: dict[str, ModelWindow] = {}
        for name in catalog.all_names():
            card = catalog.get(name).card
            digest = Digest(catalog.bundle_of(card.name)[0])
            found[name] = ModelWindow(
                digest,
                card.context_length if max_context is None else min(card.context_length, max_context),
                card.vocab_size,
                card.eos_token_ids,
                name not in own,
                card.image_rule,
                card.takes_bodies,
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

    def _has_died(self) -> bool:
        """Whether the process, not its child alone, has ended; the next request starts another."""
        if self._is_running():
            return False
        self._forget()
        return True

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
                verdict = await self._ask(LOAD, TemplateVerdict, load)
            except _Hung as error:
                self._forget()
                raise self._refused() from error
            self._verdicts[digest] = verdict
        return verdict

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._control = ours
        with theirs:
            self._process = await asyncio.to_thread(
                _start_process, theirs.fileno(), self._bounds, self._perform
            )

    def _forget(self) -> None:
        """The process ends when its control socket is closed."""
        control, self._control = self._control, None
        self._verdicts.clear()
        if control is not None:
            control.close()

    async def _ask(self, kind: bytes, answer_type: Any, *messages: bytes) -> Any:
        """Returns an `answer_type`. Raises _Hung."""
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
                answer = await _receive(ours, length)
            except OSError as error:
                raise _Hung from error
        return msgspec.msgpack.decode(answer, type=answer_type)


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


def _checked(outcome: Outcome) -> Outcome:
    """Raises the error that it may be."""
    match outcome:
        case RefusedRequest():
            raise outcome.error()
        case CrashedJob():
            raise RuntimeError(f"work beside the event loop failed:\n{outcome.traceback}")
    return outcome


def _start_process(handle: int, bounds: Bounds, perform: Perform) -> "subprocess.Popen[bytes]":
    name = f"{perform.__module__}:{perform.__qualname__}"
    module = "router.large_bodies.worker_process"
    return subprocess.Popen(
        [sys.executable, "-m", module, str(handle), msgspec.json.encode(bounds), name],
        pass_fds=[handle],
        stdin=subprocess.DEVNULL,
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
