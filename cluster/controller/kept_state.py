"""A FleetState as Ray keeps it: plain YAML that other versions of the controller can read.

Owns the format. Unknown fields are dropped, and missing settings get their defaults.
"""

from dataclasses import asdict

import msgspec
import yaml

from cluster.controller.changes import FleetState


def to_kept(state: FleetState) -> bytes:
    return yaml.safe_dump(asdict(state), sort_keys=False).encode()


def from_kept(kept: bytes) -> FleetState:
    """Parse a kept state. Raises ValueError."""
    try:
        return msgspec.convert(yaml.safe_load(kept), FleetState)
    except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"the kept state is not that of a fleet: {error!r}") from error
