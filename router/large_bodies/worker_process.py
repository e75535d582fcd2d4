"""The process beside an event loop that prepares large bodies and works out grammars, each in a child.

Owns a copy of every model's tokenizer and template, which its children share, and the bounds that a child
works under: processor time, time, memory. What happens to one child harms no other. It ends when its router
does.

A job comes as one byte and a socket. For a job this process only forks: the child reads the job there,
answers there and ends, and what it took goes back with it. A child ends by itself when its time is over
(the kernel's signal does not wait for Python), or when the router hangs up.
"""

import fcntl
import gc
import os
import pkgutil
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from replicas.protocol.status import TokenizerBundle
from router.answers.formats import AnswerFormat, answer_format
from router.errors import about_model, unknown_model
from router.large_bodies.jobs import (
    LENGTH,
    LOAD,
    WORK_OUT,
    BodyJob,
    Bounds,
    CrashedJob,
    Digest,
    LoadTextSide,
    ModelWindow,
    Perform,
)
from router.prompt.quoting import Quoter
from router.prompt.template import ChatTemplate, TemplateVerdict
from router.prompt.tokenizer import Tokenizer, TokenizerError

NICENESS = 5
"""The router's own streams come first."""


@dataclass(frozen=True, slots=True)
class _WorkerModel:
    """A TextModel."""

    card: ModelWindow
    tokenizer: Tokenizer
    template: ChatTemplate
    quoter: Quoter
    answer_format: AnswerFormat


@dataclass(frozen=True, slots=True)
class _WorkerModels:
    """TextModels of one job."""

    windows: dict[str, ModelWindow]
    loaded: dict[Digest, _WorkerModel]

    def get(self, name: str) -> _WorkerModel:
        window = self.windows.get(name)
        model = None if window is None else self.loaded.get(window.digest)
        if window is None or model is None:
            with about_model(name):
                raise unknown_model(name, self.windows)
        return replace(model, card=window)

    def names(self) -> Sequence[str]:
        return sorted(name for name, window in self.windows.items() if not window.is_other_name)


class _WorkerServer:
    def __init__(self, bounds: Bounds, perform: Perform) -> None:
        self._bounds = bounds
        self._perform = perform
        self._loaded: dict[Digest, _WorkerModel] = {}

    def serve(self, control: socket.socket) -> None:
        """Until the router is gone."""
        while True:
            kind, handles, _, _ = socket.recv_fds(control, 1, 1)
            if not kind:
                return
            with socket.socket(fileno=handles[0]) as peer, suppress(OSError, EOFError):
                if kind == LOAD:
                    self._load(peer, control)
                else:
                    is_grammar = kind == WORK_OUT
                    bounds = self._bounds.of_grammar() if is_grammar else self._bounds
                    self._fork(peer, partial(self._work, peer, is_grammar=is_grammar), control, bounds)

    def _work(self, peer: socket.socket, *, is_grammar: bool) -> None:
        """Send the outcome of a job, unless the router hangs up first."""
        job = msgspec.msgpack.decode(receive(peer), type=BodyJob)
        body = receive(peer)
        if is_grammar:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where llguidance says that its memory is over
        _end_when_left(peer, True)
        try:
            outcome = self._perform(job, _WorkerModels(job.models, self._loaded), body)
        except MemoryError:
            raise
        except Exception:  # the outermost frame of a job
            outcome = CrashedJob(traceback.format_exc())
        _end_when_left(peer, False)  # from here on it is also told that there is room to write
        send(peer, msgspec.msgpack.encode(outcome))

    def _load(self, peer: socket.socket, control: socket.socket) -> None:
        """Answers with a Verdict. The template is tried out by a child, and never run here."""
        load = msgspec.msgpack.decode(receive(peer), type=LoadTextSide)
        bundle = TokenizerBundle(load.files)
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._fork(theirs, lambda: _try_out(theirs, bundle), control, self._bounds)
            try:
                answer = receive(ours)
            except (OSError, EOFError):
                answer = msgspec.msgpack.encode(
                    TemplateVerdict(complaint=_NEVER_ENDS.format(bounds=self._bounds))
                )
        verdict = msgspec.msgpack.decode(answer, type=TemplateVerdict)
        with suppress(TokenizerError):  # the router finds out by itself
            tokenizer = Tokenizer(bundle)
            template = ChatTemplate.from_bundle(bundle, verdict=verdict)
            marks = answer_format(template.sources, tokenizer.added_tokens)
            window = ModelWindow(load.digest, 0, 0)
            self._loaded[load.digest] = _WorkerModel(
                window, tokenizer, template, Quoter(tokenizer.special_tokens), marks
            )
        send(peer, answer)

    def _fork(
        self, peer: socket.socket, work: Callable[[], None], control: socket.socket, bounds: Bounds
    ) -> None:
        if os.fork() != 0:
            return
        status = 1
        try:
            control.close()
            gc.disable()  # it would walk millions of values of a body that is forgotten at once
            _keep_to(bounds)
            work()
            status = 0
        except (OSError, EOFError, MemoryError):  # the router has hung up, or a bound is reached
            pass
        finally:
            peer.close()
            os._exit(status)  # nothing of the parent's may be cleaned up here


_NEVER_ENDS = (
    "this model's chat template takes more than {bounds} for a few short conversations, if it ends at all;"
    " use /v1/completions, or mend the checkpoint's chat_template and restart its replicas"
)


def _try_out(peer: socket.socket, bundle: TokenizerBundle) -> None:
    send(peer, msgspec.msgpack.encode(ChatTemplate.from_bundle(bundle).verdict))


def _keep_to(bounds: Bounds) -> None:
    os.nice(NICENESS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open("/proc/self/statm") as file:
        num_pages = int(file.read().split()[5])
    most = num_pages * resource.getpagesize() + bounds.num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, bounds.cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, bounds.seconds)


def _end_when_left(peer: socket.socket, is_on: bool) -> None:
    """Have the kernel end this process when the other end is closed: a signal whose default is that."""
    fcntl.fcntl(peer, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(peer, fcntl.F_GETFL)
    fcntl.fcntl(peer, fcntl.F_SETFL, flags | os.O_ASYNC if is_on else flags & ~os.O_ASYNC)


def send(peer: socket.socket, message: bytes) -> None:
    peer.sendall(LENGTH.pack(len(message)))
    peer.sendall(message)


def receive(peer: socket.socket) -> bytes:
    """Raises EOFError if the other end is closed before the message's end."""
    (length,) = LENGTH.unpack(_receive(peer, LENGTH.size))
    return bytes(_receive(peer, length))


def _receive(peer: socket.socket, length: int) -> bytearray:
    message = bytearray(length)
    rest = memoryview(message)
    while rest:
        count = peer.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return message


def main(handle: int, bounds: Bounds, perform: Perform) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the router decides when to end
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # how a child has ended does not matter
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # for what is not Python: threads do not survive a fork
    with socket.socket(fileno=handle) as control:
        _WorkerServer(bounds, perform).serve(control)


if __name__ == "__main__":
    _, handle, bounds, name = sys.argv
    main(int(handle), msgspec.json.decode(bounds, type=Bounds), pkgutil.resolve_name(name))
