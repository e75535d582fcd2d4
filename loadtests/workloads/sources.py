"""Opens a workload by what was typed: a generator's name with its parameters, or the file of a trace.

Owns the sentences for a name or parameters that cannot be.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtests.workloads import GENERATORS, Workload, read_trace, shrink
from loadtests.workloads.parameters import read_parameter

Parameters = Mapping[str, float | int | str]


def typed_parameters(name: str, qps: float | None, settings: Sequence[str]) -> Parameters:
    """Read --qps and --set. Raises ValueError."""
    given: dict[str, float | int | str] = {} if qps is None else {"qps": qps}
    if name not in GENERATORS:
        if given or settings:
            raise ValueError("--qps and --set are for generators; a trace has its own pace, see --speed")
        return {}
    try:
        return given | dict(read_parameter(name, setting) for setting in settings)
    except ValueError as error:
        raise ValueError(f"--set: {error}") from error


def open_workload(name: str, seed: int, parameters: Parameters, *, scale_tokens: float = 1.0) -> Workload:
    """Make or read it. Raises ValueError."""
    if name not in GENERATORS and not Path(name).is_file():
        raise ValueError(f"{name} is neither a file nor a generator; there are {', '.join(GENERATORS)}")
    try:
        made = (
            GENERATORS[name](seed=seed, **parameters) if name in GENERATORS else read_trace(name, seed=seed)
        )
        return made if scale_tokens == 1 else shrink(made, scale_tokens)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{name}: {error}") from error
