"""A FleetState as it is kept with Ray: plain YAML, which the controller of another version can read as well.

Owns the format. Fields that this version does not know are left out, and settings that it misses have their
defaults.
"""

from dataclasses import asdict

import msgspec
import yaml

from cluster.controller.changes import FleetState


def to_kept(state: FleetState) -> bytes:
    return yaml.safe_dump(asdict(state), sort_keys=False).encode()


def from_kept(kept: bytes) -> FleetState:
    """Raises ValueError if it is no such state."""
    try:
        return msgspec.convert(yaml.safe_load(kept), FleetState)
    except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"the kept state is not that of a fleet: {error!r}") from error
