"""build_in_time: builds and proves an engine within a deadline.

Owns the thread that builds, apart from the event loop's: one that never returns blocks only itself, and ends
with the process.
"""

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from replicas.config import ReplicaConfig
from replicas.engine import Engine
from replicas.errors import BuiltTooSlowly
from replicas.proof import prove_hashes
from replicas.protocol.status import TokenizerBundle

EngineBuilder = Callable[[ReplicaConfig], tuple[Engine, TokenizerBundle]]

GRACE_SECONDS = 10.0
"""An engine process that takes too long is ended before this is over, by the thread that waits for it."""


@dataclass(frozen=True, slots=True)
class ProvenEngine:
    """`token_seconds` is the measured time per token of the proof's prompts."""

    engine: Engine
    bundle: TokenizerBundle
    token_seconds: float


async def build_in_time(config: ReplicaConfig, build: EngineBuilder) -> ProvenEngine:
    """Raises StartupError, CheckpointError or SettingsError."""
    work = _BuildWork(config, build, asyncio.get_running_loop())
    try:
        async with asyncio.timeout(config.build_seconds + GRACE_SECONDS):
            return await work.outcome
    except TimeoutError as error:
        await work.give_up()
        raise BuiltTooSlowly(config.build_seconds) from error


class _BuildWork:
    def __init__(self, config: ReplicaConfig, build: EngineBuilder, loop: asyncio.AbstractEventLoop) -> None:
        self.outcome: asyncio.Future[ProvenEngine] = loop.create_future()
        self._loop = loop
        self._engine: Engine | None = None
        threading.Thread(target=self._run, args=(config, build), name="build", daemon=True).start()

    async def give_up(self) -> None:
        """End an engine that was built and whose proof hangs; one that cannot be ended is left behind."""
        engine = self._engine
        if engine is not None:
            ended = asyncio.Event()

            def close() -> None:
                with contextlib.suppress(Exception):
                    engine.close()
                with contextlib.suppress(RuntimeError):  # the caller has stopped waiting
                    self._loop.call_soon_threadsafe(ended.set)

            threading.Thread(target=close, name="end of build", daemon=True).start()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_SECONDS):
                    await ended.wait()

    def _run(self, config: ReplicaConfig, build: EngineBuilder) -> None:
        try:
            self._engine, bundle = build(config)
            started = time.monotonic()
            num_tokens = prove_hashes(self._engine, random.SystemRandom())
            seconds = (time.monotonic() - started) / max(1, num_tokens)
            proven = ProvenEngine(self._engine, bundle, seconds)
        except BaseException as error:  # the thread's outermost frame: the one that waits must hear of it
            if self._engine is not None:
                self._engine.close()
            self._tell(partial(self.outcome.set_exception, error))
        else:
            self._tell(partial(self.outcome.set_result, proven))

    def _tell(self, outcome: Callable[[], None]) -> None:
        def tell() -> None:
            if not self.outcome.done():
                outcome()

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(tell)
