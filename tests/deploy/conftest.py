"""What tests of deployments share: the compose file as it is understood, images that are built once."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.compose import compose_project
from tests.deploy.images import Image, ImageStore, image_store
from tests.deploy.wheels import wheel_options


@pytest.fixture(scope="session")
def project() -> dict[str, Any]:
    """deploy/compose.yaml as Docker Compose understands it."""
    return compose_project()


@pytest.fixture(scope="session")
def images() -> Iterator[ImageStore]:
    with image_store() as store:
        yield store


@pytest.fixture(scope="session")
def router_image(images: ImageStore) -> Image:
    return images.build("router")


@pytest.fixture(scope="session")
def replica_image(images: ImageStore) -> Image:
    return images.build("replica-cpu", *wheel_options())
