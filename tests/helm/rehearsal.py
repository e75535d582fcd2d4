"""What installing the chart with some values would do, without a cluster.

Lints, renders, looks at every object with Kubernetes' own schemas, then lets Helm install, upgrade and
uninstall against the API server of `api_server.py`, which keeps what it is sent and runs nothing.

    python -m tests.helm.rehearsal helm/ci/laptop.yaml
"""

import argparse
import copy
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import helm_python
import kubernetes_validate
import yaml

from tests.helm.api_server import KINDS, Key, api_server, helm_at
from tests.helm.chart import (
    DEFINED_BY_OTHERS,
    FOLDER,
    KUBERNETES,
    Object,
    Values,
    chart,
    check_fields,
    objects_in,
)

RELEASE = "kvasir"
NAMESPACE = "llm"
UNSAID: Values = {"fleet": {"mode": "statefulset"}}
"""Values that would follow from the cluster."""


class RehearsalError(Exception):
    """What an installation would not have survived, in one sentence."""


def read_values(paths: Sequence[Path]) -> Values:
    """Later files win, key by key, as with `helm --values`."""
    values: Values = {}
    for path in paths:
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError) as error:
            raise RehearsalError(f"{path} cannot be read: {error}") from error
        if not isinstance(loaded, dict):
            raise RehearsalError(f"{path} is no mapping of values")
        values = merged(values, loaded)
    return values


def merged(values: Values, over: Values) -> Values:
    found = dict(values)
    for name, item in over.items():
        old = found.get(name)
        found[name] = merged(old, item) if isinstance(old, Mapping) and isinstance(item, Mapping) else item
    return found


def check(values: Values) -> dict[str, str]:
    """Rendered files by path, notes included. Raises RehearsalError."""
    report = helm_python.lint(FOLDER, dict(values), strict=True)
    complaints = [each["error"] for each in report["messages"] if each["severity"] > 1] or report["errors"]
    if complaints:
        raise RehearsalError(f"helm lint: {'; '.join(complaints)}")
    files = chart().render(dict(values), name=RELEASE, namespace=NAMESPACE, is_install=True)
    for item in objects_in(files):
        has_schema(item)
    return dict(files)


def has_schema(item: Object) -> bool:
    """Return whether Kubernetes has a schema of this kind. Raises RehearsalError if the object breaks it."""
    try:
        check_fields(item)
    except kubernetes_validate.SchemaNotFoundError:
        return False
    except kubernetes_validate.ValidationError as error:
        raise RehearsalError(f"{item['kind']} {item['metadata']['name']}: {error.message}") from error
    return (item["apiVersion"], item["kind"]) not in DEFINED_BY_OTHERS


def rehearse(values: Values) -> Iterator[str]:
    """Lines that say what has happened. Raises RehearsalError."""
    files = check(values)
    objects = objects_in(files)
    kinds = Counter(item["kind"] for item in objects)
    num_foreign = sum(not has_schema(item) for item in objects)
    for item in objects:  # the server has all kinds; of `extraObjects` it did not know them
        KINDS.setdefault(item["apiVersion"], {}).setdefault(item["kind"], f"{item['kind'].lower()}s")
    yield f"rendered   {len(objects)}: {', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))}"
    yield (
        f"validated  {len(objects) - num_foreign} against Kubernetes {KUBERNETES}; {num_foreign} are of kinds"
        " that are not Kubernetes' own"
    )
    with api_server() as server, helm_at(server, NAMESPACE) as helm:
        helm.install(chart(), RELEASE, dict(values), namespace=NAMESPACE)
        first = copy.deepcopy(server.installed())
        yield f"installed  {len(first)}, without those that are for helm test:"
        yield from (f"             {kind} {name}" for kind, name in sorted(first))
        helm.upgrade(chart(), RELEASE, dict(values), namespace=NAMESPACE)
        second = server.installed()
        changed = [key for key in first.keys() | second.keys() if first.get(key) != second.get(key)]
        if changed:
            raise RehearsalError(f"an upgrade with the same values changed {_listed(changed)}")
        yield "upgraded   with the same values: nothing changed, no secret either"
        helm.uninstall(RELEASE)
        yield f"uninstalled, left behind: {_listed(server.objects) or 'nothing'}"
    (notes,) = [text for path, text in files.items() if path.endswith("NOTES.txt")]
    yield f"\n{notes.strip()}"


def _listed(keys: Iterable[Key]) -> str:
    return ", ".join(f"{kind} {name}" for kind, name in sorted(keys))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("values", nargs="*", type=Path, help="files of values; later ones win")
    try:
        for line in rehearse(merged(UNSAID, read_values(parser.parse_args(arguments).values))):
            print(line, flush=True)
    except (RehearsalError, helm_python.HelmError) as error:
        print(f"rehearsal: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
