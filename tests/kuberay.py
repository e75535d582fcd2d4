"""KubeRay's own description of a RayCluster, made strict: it would otherwise take any field."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(
    os.environ.get("KUBERAY_CRDS")
    or Path(__file__).resolve().parent.parent.parent / "shared" / "kuberay-crds"
)
"""Too large to be part of this repository; `config/crd/bases` of KubeRay's has the files."""


def ray_cluster_schema() -> dict[str, Any]:
    """Of version v1, as JSON schema. Where it is missing the test is skipped, and fails if CI is set."""
    path = FOLDER / "ray.io_rayclusters.yaml"
    if path.exists():
        return _read(path)
    reason = f"KubeRay's CRDs are not in {FOLDER}; KUBERAY_CRDS names a folder that has them"
    if os.environ.get("CI") or "KUBERAY_CRDS" in os.environ:
        pytest.fail(reason)
    pytest.skip(reason)


@cache
def _read(path: Path) -> dict[str, Any]:
    versions = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)["spec"]["versions"]
    (found,) = [each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == "v1"]
    schema: dict[str, Any] = _strict(found)
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def _strict(schema: Any) -> Any:
    """As the API server prunes: nothing but what is described; a quantity may be a number."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _strict(each) for name, each in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "number", "string"]}
    if isinstance(found.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found
