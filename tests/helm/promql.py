"""What a PromQL expression asks for: metrics, the labels that they must have, the labels of its result."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import promql_parser as promql

GRAFANA_NUMBERS = {"$__rate_interval": "1m", "$__range": "1h", "$__interval": "15s"}

# Over these the result keeps the labels of the argument; the others that we use are named apart.
KEEPS_LABELS = {"rate", "increase", "deriv", "changes", "avg_over_time", "max_over_time", "min_over_time"}

Labels = frozenset[str]


@dataclass(frozen=True, slots=True)
class Asked:
    """`complaints` are sentences about labels that nothing has; `labels` are those of the result."""

    metrics: Labels
    labels: Labels
    complaints: tuple[str, ...] = field(default=())


def parsed(expression: str) -> promql.Expr:
    """Raises ValueError for what is no PromQL."""
    for name, number in GRAFANA_NUMBERS.items():
        expression = expression.replace(name, number)
    return promql.parse(expression)


def asked(expression: str, labels_of: Mapping[str, Labels]) -> Asked:
    """Of metrics that `labels_of` does not know, nothing is complained about but their absence."""
    metrics: set[str] = set()
    complaints: list[str] = []
    labels = _labels(parsed(expression), labels_of, metrics, complaints)
    return Asked(frozenset(metrics), labels, tuple(complaints))


def _labels(
    expression: promql.Expr, labels_of: Mapping[str, Labels], metrics: set[str], complaints: list[str]
) -> Labels:
    def inner(part: promql.Expr) -> Labels:
        return _labels(part, labels_of, metrics, complaints)

    match expression:
        case promql.NumberLiteral() | promql.StringLiteral():
            return frozenset()
        case promql.VectorSelector():
            metrics.add(expression.name)
            labels = labels_of.get(expression.name, frozenset())
            matched = {matcher.name for matcher in expression.matchers.matchers}
            complaints += [f"{expression.name} has no label {name}" for name in matched - labels]
            return labels
        case promql.MatrixSelector():
            return inner(expression.vector_selector)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return inner(expression.expr)
        case promql.AggregateExpr():
            labels = inner(expression.expr)
            kept = _by(expression)
            complaints += [f"{expression.expr.prettify()} has no label {name}" for name in kept - labels]
            return kept
        case promql.Call():
            return _labels_of_call(expression, [inner(argument) for argument in expression.args], complaints)
        case promql.BinaryExpr():
            return _labels_of_pair(expression, inner(expression.lhs), inner(expression.rhs), complaints)
    raise AssertionError(f"not met so far: {expression!r}")


def _by(expression: promql.AggregateExpr) -> Labels:
    if expression.modifier is None:
        return frozenset()
    assert expression.modifier.type == promql.AggModifierType.By
    return frozenset(expression.modifier.labels)


def _labels_of_call(call: promql.Call, arguments: list[Labels], complaints: list[str]) -> Labels:
    name = call.func.name
    if name in KEEPS_LABELS:
        return arguments[0]
    if name == "histogram_quantile":
        if "le" not in arguments[1]:
            complaints.append(f"{call.args[1].prettify()} has no label le")
        return arguments[1] - {"le"}
    assert name in ("vector", "absent", "time"), name
    return frozenset()


def _is_scalar(expression: promql.Expr) -> bool:
    is_time = isinstance(expression, promql.Call) and expression.func.name == "time"
    return is_time or isinstance(expression, promql.NumberLiteral)


def _labels_of_pair(pair: promql.BinaryExpr, left: Labels, right: Labels, complaints: list[str]) -> Labels:
    if _is_scalar(pair.rhs):
        return left
    if _is_scalar(pair.lhs):
        return right
    matching = pair.modifier.matching if pair.modifier else None
    if matching is not None:
        assert matching.type == promql.LabelModifierType.Include
        on = frozenset(matching.labels)
        complaints += [f"{pair.prettify()}: no label {name} on both sides" for name in on - (left & right)]
        grouped_right = pair.modifier.card == promql.VectorMatchCardinality.OneToMany
        return right if grouped_right else left
    if left != right and str(pair.op) not in ("or", "and", "unless"):
        odd = ", ".join(sorted(left ^ right))
        complaints.append(f"{pair.prettify()}: one side only has {odd}; nothing will match")
    return left
