"""From a run to its displayed figures: those of its report, and how they arose. Pure.

Owns their course over time, over replicas and over tenants, and their comparison with the engines' own
counters; report.py owns a request's figures.

- Requests of the warm-up are left out, with two exceptions: plots over time show them, and comparisons with
  the engines' counters (sums of tokens, and images) include them, because the counters do.
- Over time, prompts and hits are at the scheduled time, good answers at their end.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from loadtests.reports.phases import Phase, phases_of
from loadtests.reports.report import Images, Origins, Report, RequestRecord, Slo, make_report, origins_of
from loadtests.reports.run_file import EngineTotals, LoadSample, Run, RunInfo

MOST_BINS = 40
NUM_LOOKS = 90
"""Kept samples of a replica's load."""
MOST_TENANTS = 12
NICE_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200)


@dataclass(frozen=True, slots=True)
class TimeBin:
    """Events from `start_seconds` on, for `num_seconds`."""

    start_seconds: float
    num_seconds: float
    origins: Origins
    goodput: float
    """Good answers per second."""


@dataclass(frozen=True, slots=True)
class LoadPoint:
    seconds: float
    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class Loads:
    """Load by replica. Without samples it is the client's requests in flight there, all counted as
    running."""

    of_replicas: dict[str, tuple[LoadPoint, ...]]
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class Reconciled:
    """A sum over the requests and the engines' own counters."""

    what: str
    num_of_records: int
    num_of_engines: int

    @property
    def difference(self) -> int:
        return self.num_of_engines - self.num_of_records


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Requests with unknown usage: their outcomes and prompt lengths."""

    sums: tuple[Reconciled, ...]
    silent: dict[str, int]
    num_silent_prompt_tokens: int

    @property
    def verdict(self) -> str:
        """Summarise in one sentence."""
        differing = [each for each in self.sums if each.difference]
        if not differing:
            return "Requests and engines count the same, to the token."
        amounts = ", ".join(f"{each.difference:+d} {each.what} tokens" for each in differing)
        text = f"The engines' counters differ from the sums over the requests by {amounts}"
        if not self.silent:
            return text + ", and every request said what it used: the records do not explain it."
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.silent.items())
        if any(each.difference < 0 for each in differing):
            return (
                text
                + f"; these ended without saying what they used: {kinds}, which explains no lower counter."
            )
        if max(each.difference for each in differing) > self.num_silent_prompt_tokens:
            most = self.num_silent_prompt_tokens
            return (
                text + f"; these ended without saying what they used: {kinds}, and had {most} prompt tokens."
            )
        return text + f", because these ended without saying what they used: {kinds}."


@dataclass(frozen=True, slots=True)
class RunFigures:
    """`tenants` is empty if there are none to distinguish, or too many to list."""

    info: RunInfo
    report: Report
    num_warmup_requests: int
    ttft_seconds: tuple[float, ...]
    """TTFTs of all whole answers, sorted."""
    bins: tuple[TimeBin, ...]
    loads: Loads
    reasons: dict[str, int]
    tenants: dict[str, Report]
    reconciliation: Reconciliation | None
    phases: tuple[Phase, ...] = ()


def figures_of(run: Run, slo: Slo, *, bin_seconds: float | None = None) -> RunFigures:
    counted = [each for each in run.records if each.arrival_seconds >= run.info.warmup_seconds]
    times = [each.ttft_seconds for each in counted if each.error is None and each.ttft_seconds is not None]
    return RunFigures(
        info=run.info,
        report=replace(make_report(counted, slo, num_replicas=run.info.num_replicas), images=images_of(run)),
        num_warmup_requests=len(run.records) - len(counted),
        ttft_seconds=tuple(sorted(times)),
        bins=over_time(run.records, slo, bin_seconds or nice_bin_seconds(end_of(run.records))),
        loads=_loads(run),
        reasons=dict(Counter(each.reason for each in counted if each.reason is not None).most_common()),
        tenants=_tenants(counted, slo),
        reconciliation=_reconciliation(run.records, run.engine_totals),
        phases=phases_of(run, slo),
    )


def images_of(run: Run) -> Images | None:
    """Return the images of all requests with known usage."""
    measured = [each for each in run.records if each.num_cached_tokens is not None]
    num_images = sum(each.num_images for each in measured)
    totals = run.engine_totals
    if not num_images or totals is None:
        return None
    return Images(
        num_images,
        totals.num_images,
        totals.num_image_bytes,
        sum(each.num_image_tokens for each in measured),
        totals.num_encoded_image_tokens,
    )


def end_of(records: Iterable[RequestRecord]) -> float:
    """Return the end of the last answer, in seconds since the start."""
    return max((_ended(record) for record in records), default=0.0)


def nice_bin_seconds(duration: float) -> float:
    """Return the shortest round width that makes at most MOST_BINS bins."""
    for width in NICE_SECONDS:
        if duration <= width * MOST_BINS:
            return width
    return duration / MOST_BINS


def over_time(records: Sequence[RequestRecord], slo: Slo, bin_seconds: float) -> tuple[TimeBin, ...]:
    """Return the bins. The last one ends with the last answer, and lasts 0.5 to 1.5 times as long."""
    end = end_of(records)
    if not records or end <= 0:
        return ()
    origins: dict[int, Origins] = defaultdict(Origins)
    good: Counter[int] = Counter()
    num_bins = max(1, round(end / bin_seconds))

    def number_of(seconds: float) -> int:
        return min(max(0, int(seconds / bin_seconds)), num_bins - 1)

    for record in records:
        origins[number_of(record.arrival_seconds)] += origins_of(record)
        good[number_of(_ended(record))] += slo.is_met(record)
    last = num_bins - 1
    lengths = [bin_seconds] * last + [end - last * bin_seconds]
    return tuple(
        TimeBin(number * bin_seconds, length, origins[number], good[number] / length)
        for number, length in enumerate(lengths)
    )


def _ended(record: RequestRecord) -> float:
    return record.arrival_seconds + record.lateness_seconds + (record.e2e_seconds or 0.0)


def _loads(run: Run) -> Loads:
    if run.samples:
        return Loads(_sampled(run.samples), is_sampled=True)
    return Loads(_in_flight(run.records), is_sampled=False)


def _sampled(samples: Sequence[LoadSample]) -> dict[str, tuple[LoadPoint, ...]]:
    """Thin samples that are too close to draw; the highest load stays, since peaks matter."""
    width = max(sample.seconds for sample in samples) / NUM_LOOKS or 1.0
    highest: dict[str, dict[int, LoadPoint]] = defaultdict(dict)
    for sample in samples:
        kept = highest[sample.replica]
        number = int(sample.seconds / width)
        before = kept.get(number)
        if (
            before is None
            or before.num_running + before.num_waiting < sample.num_running + sample.num_waiting
        ):
            kept[number] = LoadPoint(sample.seconds, sample.num_running, sample.num_waiting)
    return {
        replica: tuple(sorted(highest[replica].values(), key=lambda point: point.seconds))
        for replica in sorted(highest)
    }


def _in_flight(records: Sequence[RequestRecord]) -> dict[str, tuple[LoadPoint, ...]]:
    end = end_of(records)
    of_replicas: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        if record.replica is not None:
            of_replicas[record.replica].append(record)
    loads = {}
    for replica in sorted(of_replicas):
        starts = sorted(each.arrival_seconds + each.lateness_seconds for each in of_replicas[replica])
        ends = sorted(map(_ended, of_replicas[replica]))
        moments = [end * number / NUM_LOOKS for number in range(NUM_LOOKS + 1)]
        loads[replica] = tuple(
            LoadPoint(moment, bisect_right(starts, moment) - bisect_right(ends, moment), 0)
            for moment in moments
        )
    return loads


def _tenants(records: Sequence[RequestRecord], slo: Slo) -> dict[str, Report]:
    of_tenants: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        if record.tenant is not None:
            of_tenants[record.tenant].append(record)
    if not 1 < len(of_tenants) <= MOST_TENANTS:
        return {}
    return {tenant: make_report(of_tenants[tenant], slo) for tenant in sorted(of_tenants)}


def _reconciliation(records: Sequence[RequestRecord], totals: EngineTotals | None) -> Reconciliation | None:
    if totals is None:
        return None
    measured = [record for record in records if record.num_cached_tokens is not None]
    silent = [record for record in records if record.num_cached_tokens is None]
    return Reconciliation(
        sums=(
            Reconciled("prompt", sum(each.num_input_tokens for each in measured), totals.num_prompt_tokens),
            Reconciled(
                "cached", sum(each.num_cached_tokens or 0 for each in measured), totals.num_cached_tokens
            ),
            Reconciled(
                "cross-user",
                sum(each.num_cross_user_tokens or 0 for each in measured),
                totals.num_cross_user_tokens,
            ),
            *(
                each
                for each in (
                    Reconciled(
                        "host memory's", sum(r.num_host_tokens or 0 for r in measured), totals.num_host_tokens
                    ),
                    Reconciled(
                        "disk's", sum(r.num_disk_tokens or 0 for r in measured), totals.num_disk_tokens
                    ),
                )
                if each.num_of_records or each.num_of_engines
            ),
        ),
        silent=dict(Counter(record.error or "answered" for record in silent).most_common()),
        num_silent_prompt_tokens=sum(record.num_input_tokens for record in silent),
    )
