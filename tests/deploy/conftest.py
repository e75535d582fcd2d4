"""Images, built once for all tests of deployments.

Tests with the marker `images` build those that take minutes: they run only if -m asks for them.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.compose import compose_project
from tests.deploy.images import Image, ImageStore, image_store
from tests.deploy.wheels import wheel_options


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "images" in config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("images") is not None]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


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
