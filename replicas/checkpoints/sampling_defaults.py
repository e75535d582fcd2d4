"""read_sampling_defaults: a checkpoint's `generation_config.json`, as the settings have it used."""

import logging
from collections.abc import Sequence
from pathlib import Path

from replicas.checkpoints.model_config import read_json
from replicas.config import ReplicaConfig
from replicas.protocol.sampling_defaults import NAMES, NEUTRAL, SamplingDefaults, checked_default

logger = logging.getLogger(__name__)


def read_sampling_defaults(
    config: ReplicaConfig, directory: Path, names: Sequence[str] = NAMES
) -> SamplingDefaults | None:
    """Read the file's values of these `names`, and put those of the settings in their place.

    None if nothing is left to a model. Raises CheckpointError for a file that is no JSON object.
    """
    override = config.sampling_override or {}
    if config.sampling_defaults == "model":
        found = _in_file(directory / "generation_config.json", names)
    else:
        found = dict(NEUTRAL.given()) if override else {}
    given = {name: value for name, value in {**found, **override}.items() if value is not None}
    checked = {name: checked_default(name, value) for name, value in given.items()}
    return SamplingDefaults(**checked) if given else None  # type: ignore[arg-type]


def _in_file(path: Path, names: Sequence[str]) -> dict[str, float]:
    """Ignore what is out of bounds, as the log then says once."""
    fields = read_json(path) if path.is_file() else {}
    found, complaints = {}, []
    for name in names:
        try:
            if fields.get(name) is not None:
                found[name] = checked_default(name, fields[name])
        except ValueError as error:
            complaints.append(str(error))
    if complaints:
        logger.warning("%s is ignored in part: %s", path, "; ".join(complaints))
    return found
