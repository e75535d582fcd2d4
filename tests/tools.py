"""Programs that some tests need and Python's package index does not have."""

import os
import shutil

import pytest

DEBIAN_PACKAGES = {"promtool": "prometheus", "chromium": "chromium"}


def needed_tool(name: str) -> str:
    """The program's path. Where it is missing the test is skipped, and fails if CI is set: there nobody reads
    what was skipped."""
    path = shutil.which(name)
    if path is not None:
        return path
    reason = f"{name} is not installed (Debian: apt-get install {DEBIAN_PACKAGES[name]})"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
