"""Counters, gauges and histograms that one thread updates, and their text for Prometheus.

Owns the text format. Knows no metric. A part of the router that counts for itself declares its metrics in its
method `instruments()`. The ones of `prometheus_client` take a lock for every update and some 5 µs for every
line of a scrape; a router has dozens of updates per request and thousands of lines.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol


class Instrument(Protocol):
    """One metric with its series."""

    @property
    def name(self) -> str: ...
    @property
    def labels(self) -> Sequence[str]: ...
    def text(self) -> str: ...


Read = Callable[[], float | Mapping[Any, float]]
"""The number of a metric without labels, or those by its label's value, or by its labels' values."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A counter or gauge whose numbers its owner keeps; they are read at each scrape."""

    kind: str
    name: str
    help_text: str
    read: Read
    labels: tuple[str, ...]

    def text(self) -> str:
        found = self.read()
        numbers = found.items() if isinstance(found, Mapping) else [((), found)]
        series = [(value if isinstance(value, tuple) else (value,), number) for value, number in numbers]
        lines = [f"{self.name}{_braces(self.labels, values)} {_value(number)}" for values, number in series]
        return "".join((_head(self.kind, self.name, self.help_text), *lines))


def counter(name: str, help_text: str, read: Read, *labels: str) -> Reading:
    assert name.endswith("_total")
    return Reading("counter", name, help_text, read, labels)


def gauge(name: str, help_text: str, read: Read, *labels: str) -> Reading:
    assert not name.endswith("_total")
    return Reading("gauge", name, help_text, read, labels)


class Number:
    """One series of a counter or a gauge. Write to `value`."""

    __slots__ = ("line", "value")

    def __init__(self, line: str) -> None:
        self.line = line
        self.value: float = 0


class HistogramSeries:
    """One series of a histogram. `counts` has one entry per bound and one for what lies beyond."""

    __slots__ = ("bounds", "counts", "lines", "total")

    def __init__(self, bounds: Sequence[float], lines: Sequence[str]) -> None:
        self.bounds = bounds
        self.lines = lines
        self.counts = [0] * (len(bounds) + 1)
        self.total: float = 0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, counts: Sequence[int], total: float) -> None:
        """Values that were counted elsewhere, by the same bounds."""
        own = self.counts
        for position, count in enumerate(counts):
            if count:
                own[position] += count
        self.total += total


class Numbers:
    """A counter or gauge with its series. Without labels there is one series from the start."""

    def __init__(self, kind: str, name: str, help_text: str, labels: Sequence[str] = ()) -> None:
        assert kind in ("counter", "gauge") and name.endswith("_total") == (kind == "counter")
        self.name = name
        self.labels = labels
        self._head = _head(kind, name, help_text)
        self._series: dict[tuple[str, ...], Number] = {}
        if not labels:
            self.of()

    def of(self, *values: str) -> Number:
        number = self._series.get(values)
        if number is None:
            number = self._series[values] = Number(f"{self.name}{_braces(self.labels, values)} ")
        return number

    def text(self) -> str:
        lines = [number.line + _value(number.value) for number in self._series.values()]
        return "".join((self._head, *lines))


class Distributions:
    """A histogram with its series."""

    def __init__(
        self, name: str, help_text: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.bounds = bounds
        self.labels = labels
        self._head = _head("histogram", name, help_text)
        self._series: dict[tuple[str, ...], HistogramSeries] = {}
        if not labels:
            self.of()

    def of(self, *values: str) -> HistogramSeries:
        distribution = self._series.get(values)
        if distribution is None:
            distribution = self._series[values] = HistogramSeries(self.bounds, tuple(self._lines(values)))
        return distribution

    def text(self) -> str:
        lines: list[str] = []
        for series in self._series.values():
            counts = list(accumulate(series.counts))
            values = (*counts, counts[-1], series.total)
            lines += [line + _value(value) for line, value in zip(series.lines, values, strict=True)]
        return "".join((self._head, *lines))

    def _lines(self, values: Sequence[str]) -> Iterator[str]:
        for bound in (*(repr(float(bound)) for bound in self.bounds), "+Inf"):
            yield f"{self.name}_bucket{_braces((*self.labels, 'le'), (*values, bound))} "
        yield f"{self.name}_count{_braces(self.labels, values)} "
        yield f"{self.name}_sum{_braces(self.labels, values)} "


def _head(kind: str, name: str, help_text: str) -> str:
    assert "\n" not in help_text and "\\" not in help_text
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"


def _braces(labels: Sequence[str], values: Sequence[str]) -> str:
    pairs = ",".join(f'{label}="{_escaped(value)}"' for label, value in zip(labels, values, strict=True))
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _value(value: float) -> str:
    return f"{float(value)!r}\n"
