"""MediaMetrics: what a replica tells Prometheus of the images that routers send it."""

import enum

from prometheus_client import CollectorRegistry, Counter


class MediaOutcome(enum.StrEnum):
    """What became of an image that a router sent."""

    TAKEN = "taken"
    UNREADABLE = "unreadable"
    FULL = "full"


class MediaMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._images = Counter(
            "replica_images_total",
            "Images that routers have sent, by what became of them",
            ["outcome"],
            registry=registry,
        )
        self._bytes = Counter(
            "replica_image_bytes_total", "Bytes of the images that were taken, as files", registry=registry
        )
        self._seconds = Counter(
            "replica_image_read_seconds_total",
            "Time to decode images and to make of them what the model computes with",
            registry=registry,
        )
        for outcome in MediaOutcome:
            self._images.labels(outcome.value)

    def count(self, outcome: MediaOutcome) -> None:
        self._images.labels(outcome.value).inc()

    def taken(self, num_bytes: int, seconds: float) -> None:
        self.count(MediaOutcome.TAKEN)
        self._bytes.inc(num_bytes)
        self._seconds.inc(seconds)
