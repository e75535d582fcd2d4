"""Tests with the marker `images` build images, which takes minutes: they run only if -m asks for them."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "images" in config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("images") is not None]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]
