"""The chart's renderings as they were looked at: two whole, of the others what differs.

    python -m tests.helm.golden --write

Owns the files in `golden/`: a fleet of StatefulSets and one in Ray as normalised YAML, and for every other
case the fields that differ from its base (`from` in `cases.yaml`). Generated secrets are masked. Files that
the chart takes word for word are left out.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.helm.chart import BASES, EXAMPLES, Object, rendered

FOLDER = Path(__file__).parent / "golden"
WHOLE = {"nothing set": "statefulset.yaml", "KubeRay": "kuberay.yaml"}
ALIKE = (
    *("long names", "kuberay", "running-servers"),
    *("mTLS, servers of an InferencePool", "servers in DNS, KubeRay"),
)
"""Cases that would add little to what other cases show."""

DIFFERENCES = "differences.yaml"
COMMON_LABELS = ("app.kubernetes.io/", "helm.sh/")
MOST_CHARACTERS = 3000
"""Of a text in a ConfigMap. Longer ones are files of the chart."""


def normalised(item: Object) -> Object:
    if item["kind"] == "Secret":
        item = {**item, "data": dict.fromkeys(item.get("data", {}), "…")}
        texts = item.get("stringData", {})
        masked = dict.fromkeys(texts, "…")
        if "server.conf" in texts:
            masked["server.conf"] = re.sub(r">\S+", ">…", texts["server.conf"])
        item["stringData"] = masked
    elif item["kind"] == "ConfigMap":
        texts = item["data"].items()
        item = {**item, "data": {name: text if len(text) < MOST_CHARACTERS else "…" for name, text in texts}}
    elif item["kind"] == "PrometheusRule" and item["metadata"]["name"] == "demo-kvasir":
        item = {**item, "spec": "…"}
    return item


def by_key(case: str) -> dict[str, Object]:
    found = {}
    for item in rendered(case):
        key, metadata = f"{item['kind']} {item['metadata']['name']}", dict(item["metadata"])
        labels = metadata.pop("labels", {})
        metadata["labels"] = {name: labels[name] for name in labels if not name.startswith(COMMON_LABELS)}
        item = {**normalised(item), **{name: value for name, value in metadata.items() if value}}
        found[key] = {name: item[name] for name in item if name not in ("kind", "metadata", "name")}
    return found


def named_items(items: Any) -> dict[str, Any] | None:
    """Return a list's items by what names them, or None if something does not."""
    for key in ("mountPath", "name", "groupName", "targetLabel"):
        names = [item.get(key) for item in items if isinstance(item, dict)]
        if len(names) == len(items) == len({*names} - {None}):
            return dict(zip(names, items, strict=True))
    return None


def differences(old: Any, new: Any, path: str = "") -> dict[str, Any]:
    """List the fields that differ, by their paths. What is gone is None."""
    if old == new:
        return {}
    if isinstance(old, list) and isinstance(new, list) and old and new:
        old, new = named_items(old) or old, named_items(new) or new
    if not isinstance(old, dict) or not isinstance(new, dict):
        return {path: new}
    found = {}
    for name in dict.fromkeys([*new, *old]):
        before = old[name] if name in old else pool_like_main(old, name)
        found |= differences(before, new.get(name), f"{path}.{name}" if path else name)
    return found


def pool_like_main(old: dict[str, Any], name: str) -> Any:
    """Return the main pool's object or group under another pool's name, or None."""
    pool = name.rpartition("-pool-")[2]
    main = f"{name.removesuffix(pool)}main"
    if main not in old:
        return None
    text = json.dumps(old[main]).replace("pool-main", f"pool-{pool}")
    return json.loads(re.sub(r'("(?:kvasir/pool|groupName)": )"main"', rf'\1"{pool}"', text))


def written(content: Any) -> str:
    return yaml.safe_dump(content, default_flow_style=None, width=10_000, sort_keys=False, allow_unicode=True)


def made() -> dict[str, str]:
    """Return the files' texts by their names."""
    others = {}
    for case in [*EXAMPLES, *BASES]:
        if case not in (*WHOLE, *ALIKE):
            base = BASES.get(case, "nothing set")
            others[case] = {"from": [base], **differences(by_key(base), by_key(case))}
    return {WHOLE[case]: written(by_key(case)) for case in WHOLE} | {DIFFERENCES: written(others)}


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    FOLDER.mkdir(exist_ok=True)
    for name, text in made().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
