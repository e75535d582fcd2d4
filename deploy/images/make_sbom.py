"""A software bill of materials: `python make_sbom.py IMAGE`, CycloneDX 1.6 on stdout.

Lists the Python packages of the running interpreter: what an image runs, not what was requested. Debian's
packages belong to the base image and are not listed. Needs only the standard library, and is deterministic.
"""

import importlib.metadata
import json
import re
import sys
from collections.abc import Iterable
from typing import Any


def main(arguments: list[str]) -> int:
    (image,) = arguments
    json.dump(bill(image, importlib.metadata.distributions()), sys.stdout, indent=1, sort_keys=True)
    return 0


def bill(image: str, found: Iterable[importlib.metadata.Distribution]) -> dict[str, Any]:
    """Build the document. Of two packages with one name, the first is the one that is imported."""
    components: dict[str, dict[str, Any]] = {}
    for each in found:
        component = library(each)
        components.setdefault(component["bom-ref"].partition("@")[0], component)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": image}},
        "components": sorted(components.values(), key=lambda component: str(component["bom-ref"])),
    }


def library(package: importlib.metadata.Distribution) -> dict[str, Any]:
    name = re.sub(r"[-_.]+", "-", package.name).lower()
    version = package.version
    # A local label such as +cpu is part of a version, and + means a space in a URL.
    purl = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
    component: dict[str, Any] = {
        "type": "library",
        "name": name,
        "version": version,
        "purl": purl,
        "bom-ref": purl,
    }
    if "License-Expression" not in package.metadata:
        return component
    return {**component, "licenses": [{"expression": package.metadata["License-Expression"]}]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
