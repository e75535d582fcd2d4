"""Programs that some tests need and Python's package index does not have, and the right to use them."""

import os
import shutil
from typing import NoReturn

import pytest

DEBIAN_PACKAGES = {
    "promtool": "prometheus",
    "prometheus": "prometheus",
    "chromium": "chromium",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    "ip": "iproute2",
    "openssl": "openssl",
    "gcc": "gcc",
    "valgrind": "valgrind",
    "node": "nodejs",
}


def needed_tool(name: str) -> str:
    """The program's path. Where it is missing the test is skipped, and fails if CI is set: there nobody reads
    what was skipped."""
    path = shutil.which(name)
    if path is None:
        not_here(f"{name} is not installed (Debian: apt-get install {DEBIAN_PACKAGES[name]})")
    return path


def need_root(reason: str) -> None:
    """Skips the test where this is not root, and fails it if CI is set."""
    if os.geteuid() != 0:
        not_here(f"only root {reason}")


def not_here(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
