"""Telling: a store's report in the frames of its engine.

Owns what goes where: fill and speed of the tiers in the load, for routers' decisions and for people;
everything else beside it, for the replica's own metrics.
"""

from typing import TYPE_CHECKING

from msgspec.structs import replace

from replicas.protocol.bounds import MAX_BYTES
from replicas.protocol.frames import StepFrame
from replicas.protocol.tier_figures import TierFill

if TYPE_CHECKING:
    from replicas.kvstore.store import ChunkStore


def told(frame: StepFrame, store: "ChunkStore") -> StepFrame:
    """Return the frame with the store's report. The caller adds its events."""
    speeds, figures = store.speeds(), store.figures()
    disk = figures.disk or TierFill()
    load = replace(
        frame.load,
        host_seconds_per_token=speeds.host or 0.0,
        disk_seconds_per_token=speeds.disk or 0.0,
        pull_seconds_per_token=speeds.pull or 0.0,
        move_backlog_seconds=speeds.backlog_seconds,
        num_host_bytes=figures.host.num_bytes,
        max_host_bytes=figures.host.max_bytes,
        num_disk_bytes=disk.num_bytes,
        max_disk_bytes=min(disk.max_bytes, MAX_BYTES),
    )
    return replace(
        frame,
        load=load,
        look_again_seconds=store.look_again_seconds,
        leases=store.leases.take_totals(),
        tiers=figures if store.is_news(figures) else None,
        answers=store.take_overs.take_answers(),
    )
