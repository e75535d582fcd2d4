"""The child of an EngineProcess: builds an engine and answers for it, one question at a time.

Owns the end of this process: it goes when its parent has gone, however that came about, and obeys no
signal that a person sends to the replica. Knows nothing of gRPC, Redis or leases.
"""

import logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from replicas.engine import Engine, RequestRefused
from replicas.engine_process import (
    ENCODER,
    QUESTIONS,
    STARTUP_ERRORS,
    Abort,
    Add,
    Answer,
    Build,
    Built,
    Close,
    Done,
    Failed,
    NotBuilt,
    Question,
    Refused,
    ResetPrefixCache,
    Step,
    Stepped,
)
from replicas.engines import build_engine
from replicas.vllm_engine.environment import vllm_environment

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s [engine process] %(message)s"


def main(arguments: Sequence[str]) -> int:
    """The argument is the file descriptor of the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    connection: Connection[Any, Any] = Connection(int(arguments[0]))
    threading.Thread(target=_end_with_parent, args=(connection.fileno(),), daemon=True).start()
    engine = _build(connection)
    if engine is None:
        return 1
    while (question := _next(connection)) != Close():
        connection.send_bytes(ENCODER.encode(_answer(engine, question)))
    engine.close()
    logging.shutdown()
    os._exit(0)  # to take an interpreter with a model library apart takes seconds


def _next(connection: "Connection[Any, Any]") -> Question:
    try:
        return QUESTIONS.decode(connection.recv_bytes())
    except (EOFError, OSError):
        sys.exit(1)  # the parent has gone


def _end_with_parent(descriptor: int) -> None:
    """In the middle of a step too, which is not worth finishing: nobody is left to hear of it."""
    hung_up = select.poll()
    hung_up.register(descriptor, 0)
    hung_up.poll()
    os._exit(1)


def _build(connection: "Connection[Any, Any]") -> Engine | None:
    """Build what the first question says, and answer it. None if there is no such engine."""
    question = _next(connection)
    assert isinstance(question, Build)
    if question.config.engine == "vllm":
        os.environ.update(vllm_environment(question.config.num_threads))
    try:
        engine, bundle = build_engine(question.config)
    except STARTUP_ERRORS as error:
        (kind,) = (kind.__name__ for kind in STARTUP_ERRORS if isinstance(error, kind))
        connection.send_bytes(ENCODER.encode(NotBuilt(kind, str(error))))
        return None
    connection.send_bytes(ENCODER.encode(Built(engine.card, bundle)))
    return engine


def _answer(engine: Engine, question: Question) -> Answer:
    try:
        match question:
            case Step():
                frame = engine.step()
                return Stepped.of(frame, engine.has_work())
            case Add(request):
                engine.add(request)
            case Abort(key):
                engine.abort(key)
            case ResetPrefixCache():
                done = engine.reset_prefix_cache()
                return Done(engine.has_work(), done)
            case _:
                raise AssertionError(f"nobody asks for {question} here")
    except RequestRefused as refused:
        return Refused(engine.has_work(), refused.code, refused.message)
    except Exception as error:  # the parent raises in its stead
        return Failed(repr(error), traceback.format_exc())
    return Done(engine.has_work())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
