"""The bill of materials of an image lists what its interpreter finds."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.packages

ROOT = Path(__file__).resolve().parent.parent.parent


def test_it_lists_every_package_that_is_installed_once_and_the_same_each_time() -> None:
    command = [sys.executable, ROOT / "deploy/images/make_sbom.py", "kvasir-router"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == text
    bill = json.loads(text)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "kvasir-router"
    listed = {component["name"]: component["version"] for component in bill["components"]}
    assert len(listed) == len(bill["components"])
    names = "import importlib.metadata as m; print(*{each.name for each in m.distributions()})"
    found = subprocess.run([sys.executable, "-I", "-c", names], capture_output=True, text=True, check=True)
    assert set(listed) == {re.sub(r"[-_.]+", "-", name).lower() for name in found.stdout.split()}
    assert listed["grpcio"] == importlib.metadata.version("grpcio")
    assert all(component["purl"].startswith("pkg:pypi/") for component in bill["components"])
    assert all("+" not in component["purl"] for component in bill["components"])
