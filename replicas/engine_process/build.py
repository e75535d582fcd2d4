"""build_engine: an engine as settings want it, in this process or in one of its own.

Owns that choice. Which engine it is, `engines.py` decides.
"""

from replicas.config import ReplicaConfig
from replicas.engine import Engine
from replicas.engine_process.parent import EngineProcess
from replicas.engines import build_engine_here
from replicas.protocol.status import TokenizerBundle


def build_engine(config: ReplicaConfig) -> tuple[Engine, TokenizerBundle]:
    """Raises CheckpointError, SettingsError or StartupError. Takes seconds, and blocks."""
    if not config.has_engine_process:
        return build_engine_here(config)
    engine = EngineProcess(config)
    return engine, engine.bundle()
