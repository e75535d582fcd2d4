"""Panels, rows and dashboards as data, and their JSON for Grafana 10 and 11.

Owns Grafana's schema (layout, variables, data source, thresholds), and how a rate, a share and a quantile are
written. `*_panels.py` has the content.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 39
"""Grafana 10.4 and 11.0 write this version; older releases of 10 read it, newer ones migrate it."""

COLUMNS = 24
SIZES = {"stat": (4, 4), "timeseries": (8, 8), "table": (24, 8)}
"""Width and height of a panel by its kind. A row has panels of one kind."""

DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}

FILTERS = {
    "ROUTER": 'namespace=~"$namespace",router=~"$router"',
    "MODEL": 'namespace=~"$namespace",router=~"$router",model=~"$model"',
    "TENANT": 'namespace=~"$namespace",router=~"$router",tenant=~"$tenant"',
    "REPLICA": 'namespace=~"$namespace",replica=~"$replica"',
    "FLEET": 'namespace=~"$namespace"',
}
"""Matchers by their word in the expressions; a matcher of an absent label also matches without it."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A drop-down with the values of `label` in `metric`."""

    name: str
    metric: str
    label: str


VARIABLES = (
    Variable("namespace", "router_in_flight", "namespace"),
    Variable("router", 'router_in_flight{namespace=~"$namespace"}', "router"),
    Variable("model", 'router_prompt_tokens_total{namespace=~"$namespace"}', "model"),
    Variable("replica", 'replica_total_blocks{namespace=~"$namespace"}', "replica"),
    Variable("tenant", 'router_tenant_requests_total{namespace=~"$namespace"}', "tenant"),
)


@dataclass(frozen=True, slots=True)
class Query:
    expression: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Show queries: as a graph, as the latest value (`stat`), or with a column per query (`table`).

    `limits` are (value, colour): above the value the panel has the colour; below all it is `calm`.
    """

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    limits: tuple[tuple[float, str], ...] = ()
    calm: str = "text"
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]


def rate(counter: str, filters: str, by: str = "") -> str:
    return f"sum{by and f' by ({by})'} (rate({counter}{{{filters}}}[$__rate_interval]))"


def ratio(part: str, whole: str, filters: str, by: str = "") -> str:
    return f"{rate(part, filters, by)} / {rate(whole, filters, by)}"


def events(counter: str, filters: str, by: str = "") -> str:
    """Write the number of events between two points of the graph, for rare events."""
    return rate(counter, filters, by).replace("(rate(", "(increase(")


def quantile(share: float, histogram: str, filters: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share:g}, {rate(f'{histogram}_bucket', filters, labels)})"


def quantiles(histogram: str, filters: str) -> tuple[Query, ...]:
    return tuple(
        Query(quantile(share, histogram, filters), f"p{100 * share:g}") for share in (0.5, 0.9, 0.99)
    )


def filtered(expression: str) -> str:
    for word, matchers in FILTERS.items():
        expression = expression.replace("{" + word, "{" + matchers)
    return expression


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    panels = list(_placed(dashboard.rows))
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    used = [variable for variable in VARIABLES if any(f"${variable.name}" in text for text in expressions)]
    return {
        "annotations": {"list": []},
        "description": dashboard.description,
        "editable": True,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "id": None,
        "links": [_links()],
        "panels": panels,
        "refresh": "10s",
        "schemaVersion": SCHEMA_VERSION,
        "tags": ["kvasir"],
        "templating": {"list": [_data_source_variable(), *map(_variable, used)]},
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "",
        "title": dashboard.title,
        "uid": dashboard.uid,
        "version": 1,
        "weekStart": "",
    }


def _links() -> dict[str, Any]:
    return {
        "asDropdown": False,
        "icon": "external link",
        "includeVars": True,
        "keepTime": True,
        "tags": ["kvasir"],
        "targetBlank": False,
        "title": "Kvasir",
        "type": "dashboards",
        "url": "",
    }


def _data_source_variable() -> dict[str, Any]:
    return {
        "current": {},
        "hide": 0,
        "includeAll": False,
        "label": "Data source",
        "multi": False,
        "name": "datasource",
        "options": [],
        "query": "prometheus",
        "refresh": 1,
        "regex": "",
        "skipUrlSync": False,
        "type": "datasource",
    }


def _variable(variable: Variable) -> dict[str, Any]:
    query = f"label_values({variable.metric}, {variable.label})"
    return {
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "datasource": DATA_SOURCE,
        "definition": query,
        "hide": 0,
        "includeAll": True,
        "label": variable.name.capitalize(),
        "multi": True,
        "name": variable.name,
        "options": [],
        "query": {"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2,
        "regex": "",
        "skipUrlSync": False,
        "sort": 1,
        "type": "query",
    }


def _placed(rows: tuple[Row, ...]) -> Iterator[dict[str, Any]]:
    """Yield rows and panels with ids and positions, left to right, top to bottom."""
    panel_id = top = 0
    for row in rows:
        panel_id += 1
        yield {
            "collapsed": False,
            "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": top},
            "id": panel_id,
            "panels": [],
            "title": row.title,
            "type": "row",
        }
        top += 1
        left = height = 0
        for panel in row.panels:
            width, height = SIZES[panel.kind]
            if left + width > COLUMNS:
                left, top = 0, top + height
            panel_id += 1
            place = {"h": height, "w": width, "x": left, "y": top}
            yield {"gridPos": place, "id": panel_id, **_panel(panel)}
            left += width
        top += height


def _panel(panel: Panel) -> dict[str, Any]:
    content: dict[str, Any] = {
        "datasource": DATA_SOURCE,
        "description": panel.description,
        "fieldConfig": {"defaults": _field_defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [_target(panel, number, query) for number, query in enumerate(panel.queries)],
        "title": panel.title,
        "type": panel.kind,
    }
    if panel.kind == "table":
        content["transformations"] = _one_table(panel)
    return content


def _field_defaults(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": panel.calm, "value": None}]
    steps += [{"color": color, "value": value} for value, color in panel.limits]
    thresholds = {"mode": "absolute", "steps": steps}
    defaults: dict[str, Any] = {"thresholds": thresholds, "unit": panel.unit, "min": 0}
    if panel.unit == "percentunit":
        defaults["max"] = 1
    if panel.kind == "timeseries":
        defaults["color"] = {"mode": "palette-classic"}
        defaults["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 40 if panel.is_stacked else 0,
            "lineWidth": 1,
            "showPoints": "never",
            "stacking": {"group": "A", "mode": "normal" if panel.is_stacked else "none"},
            "thresholdsStyle": {"mode": "dashed" if panel.limits else "off"},
        }
    else:
        defaults["color"] = {"mode": "thresholds"}
    return defaults


def _target(panel: Panel, number: int, query: Query) -> dict[str, Any]:
    is_table = panel.kind == "table"
    return {
        "datasource": DATA_SOURCE,
        "editorMode": "code",
        "expr": filtered(query.expression),
        "format": "table" if is_table else "time_series",
        "instant": is_table,
        "legendFormat": query.legend,
        "range": not is_table,
        "refId": chr(ord("A") + number),
    }


def _one_table(panel: Panel) -> list[dict[str, Any]]:
    names = {f"Value #{chr(ord('A') + number)}": query.legend for number, query in enumerate(panel.queries)}
    return [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": names}},
    ]


_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {
            "calcs": ["mean", "max"],
            "displayMode": "list",
            "placement": "bottom",
            "showLegend": True,
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    },
    "table": {"cellHeight": "sm", "showHeader": True},
}
