"""Writes the dashboards' JSON files next to itself.

    python helm/dashboards/make_dashboards.py [FOLDER]

Owns the file names. Panels are in `*_panels.py`; a test fails while the files are stale.
"""

import json
import sys
from pathlib import Path

from cache_panels import CACHE
from fleet_panels import FLEET
from grafana import dashboard_json
from router_panels import ROUTER
from tenant_panels import TENANT

DASHBOARDS = {"fleet": FLEET, "router": ROUTER, "cache": CACHE, "tenant": TENANT}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent
    for name, dashboard in DASHBOARDS.items():
        text = json.dumps(dashboard_json(dashboard), indent=1, ensure_ascii=False)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
