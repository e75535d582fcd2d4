"""ImageMetrics: a replica's metrics on images from routers."""

import enum

from prometheus_client import CollectorRegistry, Counter, Gauge

from replicas.protocol.frames import StepFrame


class ImageOutcome(enum.StrEnum):
    """Outcome of an image that a router sent."""

    TAKEN = "taken"
    UNREADABLE = "unreadable"
    FULL = "full"


class ImageMetrics:
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
        self._encoded = Counter(
            "replica_encoded_image_tokens_total",
            "Tokens of the images that the engine has encoded",
            registry=registry,
        )
        self._encode_seconds = Gauge(
            "replica_encode_seconds_per_image_token",
            "What encoding an image takes for each token, beside computing it; 0 until it is measured",
            registry=registry,
        )
        for outcome in ImageOutcome:
            self._images.labels(outcome.value)

    def count(self, outcome: ImageOutcome) -> None:
        self._images.labels(outcome.value).inc()

    def taken(self, num_bytes: int, seconds: float) -> None:
        self.count(ImageOutcome.TAKEN)
        self._bytes.inc(num_bytes)
        self._seconds.inc(seconds)

    def encoded(self, frame: StepFrame) -> None:
        if frame.num_encoded_tokens:
            self._encoded.inc(frame.num_encoded_tokens)
        self._encode_seconds.set(frame.load.encode_seconds_per_token)
