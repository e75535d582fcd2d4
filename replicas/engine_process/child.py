"""The child of an EngineProcess: builds an engine, answers for it, and in the end lets it run.

Owns the end of this process: it goes when its parent has gone, however that came about, and obeys no
signal that a person sends to the replica. gRPC, Redis and leases stay in the parent.
"""

import logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from replicas.engine import Engine, EngineRequest, RequestRefused
from replicas.engine_process.parent import (
    ENCODER,
    QUESTIONS,
    STARTUP_ERRORS,
    AbortChoice,
    Add,
    AskStore,
    Build,
    Built,
    Close,
    Done,
    EngineFailed,
    FromChild,
    NotBuilt,
    Refused,
    ResetPrefixCache,
    StartLoop,
    StepOnce,
    Stepped,
    Take,
    TakeMedia,
    ToChild,
)
from replicas.engines import build_engine_here
from replicas.loop import EngineLoop
from replicas.process.logs import set_up_logs
from replicas.vllm_engine.environment import vllm_environment

logger = logging.getLogger(__name__)

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s [engine process] %(message)s"


def main(arguments: Sequence[str]) -> int:
    """The argument is the file descriptor of the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_up_logs(text_format=TEXT_FORMAT)
    connection: Connection[Any, Any] = Connection(int(arguments[0]))
    threading.Thread(target=_end_with_parent, args=(connection.fileno(),), daemon=True).start()
    engine = _build(connection)
    if engine is None:
        return 1
    while (question := _next(connection)) not in (Close(), StartLoop()):
        connection.send_bytes(ENCODER.encode(_answer(engine, question)))
    if question == StartLoop():
        _run(engine, connection)
    else:
        engine.close()
    logging.shutdown()
    os._exit(0)  # to take an interpreter with a model library apart takes seconds


def _next(connection: "Connection[Any, Any]") -> ToChild:
    try:
        return QUESTIONS.decode(connection.recv_bytes())
    except (EOFError, OSError):
        sys.exit(1)  # the parent has gone


def _end_with_parent(descriptor: int) -> None:
    """In the middle of a step too: without the parent, its result would reach no router."""
    hung_up = select.poll()
    hung_up.register(descriptor, 0)
    hung_up.poll()
    os._exit(1)


def _build(connection: "Connection[Any, Any]") -> Engine | None:
    """Build the engine of the first question, and answer it. None if that fails."""
    question = _next(connection)
    assert isinstance(question, Build)
    fields = {"service": "engine", "replica": question.config.replica_id}
    set_up_logs(question.config.log_format, question.config.log_level, fields=fields, text_format=TEXT_FORMAT)
    if question.config.engine == "vllm":
        config = question.config
        os.environ.update(vllm_environment(config.num_threads, config.engine_args, os.environ))
    try:
        engine, bundle = build_engine_here(question.config)
    except STARTUP_ERRORS as error:
        (kind,) = (kind.__name__ for kind in STARTUP_ERRORS if isinstance(error, kind))
        connection.send_bytes(ENCODER.encode(NotBuilt(kind, str(error))))
        return None
    connection.send_bytes(ENCODER.encode(Built(engine.card, bundle, engine.shared_kv)))
    return engine


def _run(engine: Engine, connection: "Connection[Any, Any]") -> None:
    """Run the engine until the parent says Close; a failure is the parent's to handle."""

    def send(answer: FromChild) -> None:
        with suppress(OSError):  # the parent has gone, and in a moment so have we
            connection.send_bytes(ENCODER.encode(answer))

    loop = EngineLoop(
        engine,
        lambda frame, seconds: send(Stepped(frame, has_work=True, seconds=seconds)),
        lambda error: send(EngineFailed(repr(error), "".join(traceback.format_exception(error)))),
    )
    loop.start()
    while (message := _next(connection)) != Close():
        match message:
            case Take(serial, submit):
                loop.submit(serial, submit)
            case AbortChoice(key):
                loop.abort(key)
            case AskStore(asked):
                loop.ask_store(asked)
            case TakeMedia(item):
                loop.take_media(item)
            case _:
                raise AssertionError(f"{message} comes too late")
    loop.stop()


def _answer(engine: Engine, question: ToChild) -> FromChild:
    try:
        match question:
            case StepOnce():
                frame = engine.step()
                return Stepped(frame, has_work=engine.has_work())
            case Add(key, submit):
                engine.add(EngineRequest(key, submit, submit.token_ids()))
            case AbortChoice(key):
                engine.abort(key)
            case TakeMedia(item):
                engine.take_media(item)
            case ResetPrefixCache():
                done = engine.reset_prefix_cache()
                return Done(engine.has_work(), done)
            case _:
                raise AssertionError(f"{question} is not for a running engine")
    except RequestRefused as refused:
        return Refused(engine.has_work(), refused.code, refused.message)
    except Exception as error:  # the parent raises in its stead
        return EngineFailed(repr(error), traceback.format_exc())
    return Done(engine.has_work())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
