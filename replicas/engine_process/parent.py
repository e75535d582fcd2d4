"""EngineProcess: an engine in a process of its own, behind the Engine protocol.

Owns the child process, the pipe and its messages: one question and one answer per call of the protocol.
`child.py` builds and drives the engine at the other end.

After the child died, the next call raises EngineDied. `StartLoop` ends the questions and answers: from then
on the child drives the engine itself, and `process_loop.py` sends and receives.
"""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import msgspec

from replicas.checkpoints.model_config import CheckpointError
from replicas.config import ReplicaConfig
from replicas.engine import EngineRequest, RequestRefused, SharedKv
from replicas.errors import BuiltTooSlowly, EngineDied, StartupError
from replicas.process.settings import SettingsError
from replicas.protocol.frames import RefusalCode, RequestKey, StepFrame, Submit
from replicas.protocol.hand_overs import StoreQuestion
from replicas.protocol.media import ImageQuery
from replicas.protocol.status import ModelCard, TokenizerBundle

CLOSE_SECONDS = 5.0
"""How long the child may take to give everything back before it is killed."""

OBITUARY_SECONDS = 1.0

STARTUP_ERRORS: tuple[type[Exception], ...] = (SettingsError, CheckpointError, StartupError)
"""Errors of `build_engine` that are meant for people; each crosses the pipe as itself."""


class Build(msgspec.Struct, frozen=True, tag=True):
    config: ReplicaConfig


class Add(msgspec.Struct, frozen=True, tag=True):
    """One choice of a request."""

    key: RequestKey
    submit: Submit


class AbortChoice(msgspec.Struct, frozen=True, tag=True):
    key: RequestKey


class StepOnce(msgspec.Struct, frozen=True, tag=True):
    pass


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    pass


class StartLoop(msgspec.Struct, frozen=True, tag=True):
    """Has no answer but frames, for as long as the engine lives."""


class Take(msgspec.Struct, frozen=True, tag=True):
    """A request with all its choices, under the serial that the replica gave it."""

    serial: int
    submit: Submit


class AskStore(msgspec.Struct, frozen=True, tag=True):
    """Is answered in a frame."""

    question: StoreQuestion


class TakeMedia(msgspec.Struct, frozen=True, tag=True):
    """Is answered in a frame."""

    question: ImageQuery


class Close(msgspec.Struct, frozen=True, tag=True):
    """Has no answer but the end of the process."""


class Built(msgspec.Struct, frozen=True, tag=True):
    card: ModelCard
    bundle: TokenizerBundle
    shared_kv: SharedKv | None = None


class NotBuilt(msgspec.Struct, frozen=True, tag=True):
    """`kind` is the name of one of `STARTUP_ERRORS`."""

    kind: str
    sentence: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """`value` is the result of `reset_prefix_cache`; others have none."""

    has_work: bool
    value: bool = True


class Refused(msgspec.Struct, frozen=True, tag=True):
    has_work: bool
    code: RefusalCode
    message: str


class Stepped(msgspec.Struct, frozen=True, tag=True):
    frame: StepFrame
    has_work: bool
    seconds: float = 0.0


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine raised an unexpected exception."""

    summary: str
    traceback: str


ToChild: TypeAlias = (
    Build | Add | AbortChoice | StepOnce | ResetPrefixCache | StartLoop | Take | AskStore | TakeMedia | Close
)
FromChild: TypeAlias = Built | NotBuilt | Done | Refused | Stepped | EngineFailed

ENCODER = msgspec.msgpack.Encoder()
QUESTIONS: "msgspec.msgpack.Decoder[ToChild]" = msgspec.msgpack.Decoder(ToChild)
ANSWERS: "msgspec.msgpack.Decoder[FromChild]" = msgspec.msgpack.Decoder(FromChild)


class EngineProcess:
    """Raises SettingsError, CheckpointError or StartupError, as the engine itself would."""

    def __init__(self, config: ReplicaConfig) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "replicas.engine_process.child", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                process_group=0,  # a Ctrl-C in the terminal is for the replica, which drains
            )
        atexit.register(self._process.kill)  # a child that hangs would not see the pipe close
        self._has_work = False
        try:
            built = self._build(config)
        except BaseException:
            self.close()
            raise
        self._card, self._bundle, self._shared_kv = built.card, built.bundle, built.shared_kv

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def shared_kv(self) -> SharedKv | None:
        return self._shared_kv

    @property
    def pid(self) -> int:
        return self._process.pid

    def bundle(self) -> TokenizerBundle:
        """Return the files that the model's text goes through."""
        return self._bundle

    def add(self, request: EngineRequest) -> None:
        self._call(Add(request.key, request.submit))

    def abort(self, key: RequestKey) -> None:
        self._call(AbortChoice(key))

    def has_work(self) -> bool:
        return self._has_work

    def step(self) -> StepFrame:
        answer = self._call(StepOnce())
        assert isinstance(answer, Stepped)
        return answer.frame

    def ask_store(self, question: StoreQuestion) -> None:
        """The loop beside the engine does."""

    def take_media(self, question: ImageQuery) -> None:
        self._call(TakeMedia(question))

    def begin(self, wake: Callable[[], None]) -> None:
        """The loop beside the engine does."""

    def reset_prefix_cache(self) -> bool:
        answer = self._call(ResetPrefixCache())
        assert isinstance(answer, Done)
        return answer.value

    def close(self) -> None:
        """Ask the child to end; kill it if it does not."""
        with suppress(OSError):
            self._connection.send_bytes(ENCODER.encode(Close()))
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._connection.close()
        atexit.unregister(self._process.kill)

    def kill(self) -> None:
        """Callers that wait for an answer get EngineDied."""
        self._process.kill()

    def _build(self, config: ReplicaConfig) -> Built:
        try:
            self.send(Build(config))
            if not self._connection.poll(config.build_seconds):
                raise BuiltTooSlowly(config.build_seconds)
            answer = self.receive()
        except EngineDied as error:
            raise StartupError(f"the engine did not start: {error}") from error
        if isinstance(answer, NotBuilt):
            (kind,) = (kind for kind in STARTUP_ERRORS if kind.__name__ == answer.kind)
            raise kind(answer.sentence)
        assert isinstance(answer, Built)
        return answer

    def _call(self, question: ToChild) -> Done | Stepped:
        answer = self._ask(question)
        assert isinstance(answer, Done | Stepped | Refused)
        self._has_work = answer.has_work
        if isinstance(answer, Refused):
            raise RequestRefused(answer.code, answer.message)
        return answer

    def _ask(self, question: ToChild) -> FromChild:
        self.send(question)
        return self.receive()

    def send(self, question: ToChild) -> None:
        """Raises EngineDied."""
        try:
            self._connection.send_bytes(ENCODER.encode(question))
        except OSError as error:
            raise EngineDied(self._obituary()) from error

    def receive(self) -> FromChild:
        """Return the child's next message. Raises EngineDied if it or its engine has ended."""
        try:
            answer = ANSWERS.decode(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise EngineDied(self._obituary()) from error
        if isinstance(answer, EngineFailed):
            died = EngineDied(answer.summary)
            died.add_note(answer.traceback)
            raise died
        return answer

    def _obituary(self) -> str:
        try:
            status = self._process.wait(OBITUARY_SECONDS)
        except subprocess.TimeoutExpired:
            return f"its process {self.pid} does not answer any more"
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"its process {self.pid} {how}"
