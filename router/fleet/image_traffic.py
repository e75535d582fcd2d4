"""ImageTraffic: outcomes of the images that this router sent to replicas.

Owns the counts, for the router's life: clients come and go with their connections.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from replicas.protocol.frames import RefusalCode
from router.shared.instruments import Distributions, Instrument, counter

UPLOAD_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds, up to the limit of one upload."""


FAILURES = (RefusalCode.INVALID_REQUEST, RefusalCode.OVERLOADED, RefusalCode.INTERNAL)
"""Errors of uploads. They start at 0, so that the first failure is an increase."""


@dataclass(slots=True)
class ImageTraffic:
    """`num_known` are images that should have been there already, `num_shared` those that another prompt was
    sending just then, `num_again` those of `num_sent` whose prompt was refused for want of an image.
    One upload that fails is one failure, however many wait for it."""

    num_sent: int = 0
    num_shared: int = 0
    num_known: int = 0
    num_again: int = 0
    num_bytes: int = 0
    num_failed: Counter[RefusalCode] = field(default_factory=lambda: Counter(dict.fromkeys(FAILURES, 0)))
    uploads: Distributions = field(
        default_factory=lambda: Distributions(
            "router_image_upload_seconds", "Time to send an image to a replica that took it", UPLOAD_BOUNDS
        )
    )

    def sent(self, num_bytes: int, seconds: float, *, is_again: bool) -> None:
        self.num_sent += 1
        self.num_again += is_again
        self.num_bytes += num_bytes
        self.uploads.of().observe(seconds)

    def instruments(self) -> Iterator[Instrument]:
        yield counter(
            "router_images_total",
            "Images of prompts by how they got to the replica: sent, shared (another prompt was sending it), "
            "known (it was there) or failed",
            lambda: {
                "sent": self.num_sent,
                "shared": self.num_shared,
                "known": self.num_known,
                "failed": self.num_failed.total(),
            },
            "way",
        )
        yield counter(
            "router_image_failures_total",
            "Images that a replica did not take, by its reason",
            lambda: {code.value: count for code, count in self.num_failed.items()},
            "reason",
        )
        yield counter(
            "router_image_bytes_total",
            "Bytes of the images that were sent to replicas",
            lambda: self.num_bytes,
        )
        yield counter(
            "router_images_sent_again_total",
            "Images that were sent again because the replica missed one of their prompt",
            lambda: self.num_again,
        )
        yield self.uploads
