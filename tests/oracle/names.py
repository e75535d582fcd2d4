"""Names that others rely on, asked of a checkout: metrics with labels and types, settings, commands."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

_PAGES = """\
import json, runpy
made = runpy.run_path("docs/make_reference.py")
print(json.dumps({name: made[f"{name}_page"]() for name in ("settings", "metrics", "commands")}))
"""
_NAMES = {"settings": 2, "metrics": 2, "commands": 1}
"""How many cells of a row are names and values. The last one is a sentence, which may be better tomorrow."""

_KVASIR = "import sys; from cluster.cli import main; sys.exit(main())"
_SIMULATED = (
    ("cross-user", "--set=qps=30", "--replicas=4", "--limit=400"),
    ("chat", "--set=qps=6", "--replicas=4", "--capacity=30000", "--limit=250"),
    ("agent", "--set=qps=3", "--replicas=4", "--routers=2", "--ram=4GB", "--pull=1GB/s", "--limit=250"),
    ("mixed", "--limit=400", "--replicas=4", "--kill=1@20:10"),
)


_MEASURED = ("decision_us", "wall_seconds")


def names(checkout: Path) -> dict[str, str]:
    """What the reference is made of, one page each, without its sentences."""
    pages = json.loads(_run(checkout, "-c", _PAGES))
    return {name: "\n".join(_rows(pages[name], count)) for name, count in _NAMES.items()}


def _rows(page: str, count: int) -> list[str]:
    rows = []
    for line in page.splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line)[1:]
            rows.append(" | ".join(cell.strip() for cell in cells[:count]))
        elif line.startswith("#"):
            rows.append(line)
    return rows


def simulated(checkout: Path, folder: Path) -> dict[str, str]:
    """Figures of fleets under load, in virtual time and by the router's decisions."""
    found = {}
    for arguments in _SIMULATED:
        path = folder / "figures.json"
        _run(checkout, "-c", _KVASIR, "simulate", *arguments, "--seed=1", "--jobs=1", f"--json={path}")
        results = _without_durations(json.loads(path.read_text())["results"])
        found[" ".join(arguments)] = json.dumps(results, indent=1)
    return found


def _without_durations(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_durations(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: _without_durations(each) for name, each in value.items() if name not in _MEASURED}


def _run(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["env", f"PYTHONPATH={checkout}", sys.executable, *arguments],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{arguments}: {done.stderr[-2000:]}")
    return done.stdout
