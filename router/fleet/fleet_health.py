"""FleetHealth: knowledge about replicas that are absent now.

Plain data between the follower of the fleet and the owner of requests for it.
"""

from typing import NamedTuple


class FleetHealth(NamedTuple):
    """Whether replicas of a model that has none are on their way, and for how long it has had none."""

    is_coming: bool
    away_seconds: float = 0.0


NOTHING_COMING = FleetHealth(is_coming=False)
