"""The README names every setting, and none that does not exist."""

import dataclasses
from pathlib import Path

import pytest

from replicas.config import ReplicaConfig
from router.config import RouterConfig

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def table_after(heading: str) -> dict[str, str]:
    """First column (without backticks) to the rest of the row, of the first table after `heading`."""
    rows: dict[str, str] = {}
    for line in README.split(heading, 1)[1].splitlines():
        if line.startswith("| `"):
            name, _, rest = line.strip("| ").partition(" | ")
            rows[name.strip("`")] = rest
        elif rows and not line.startswith("|"):
            break
    return rows


@pytest.mark.parametrize(
    ("heading", "config_class"),
    [("**Settings of a replica**", ReplicaConfig), ("**Settings of a router**", RouterConfig)],
)
def test_every_setting_stands_in_the_readme_with_its_default(heading: str, config_class: type) -> None:
    documented = table_after(heading)
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    assert list(documented) == list(fields)
    for name, field in fields.items():
        assert documented[name].split(" | ")[0] == f"`{field.default}`", name
