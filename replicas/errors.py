"""The errors that keep a replica from serving, each with one sentence for its operator.

    ReplicaError
    ├── StartupError        it would not start, or must not: nothing was registered
    │   └── BuiltTooSlowly
    ├── EngineDied          the engine raised; its requests were ended
    ├── EngineHung          the engine has work and ends no step; its requests go elsewhere
    └── LeaseLost           another process serves under this replica's id

Also SettingsError (`process/settings.py`) and CheckpointError (`checkpoints`).
"""


class ReplicaError(Exception):
    pass


class StartupError(ReplicaError):
    pass


class BuiltTooSlowly(StartupError):
    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the engine was not ready within {seconds:g} seconds; if it needs longer to load its model,"
            " raise setting build_seconds"
        )


class EngineDied(ReplicaError):
    pass


class EngineHung(ReplicaError):
    pass


class LeaseLost(ReplicaError):
    pass
