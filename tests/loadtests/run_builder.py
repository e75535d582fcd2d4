"""Runs as a load test could have left them, from a seed."""

import random
from dataclasses import replace

from loadtests.reports.report import RequestRecord
from loadtests.reports.run_file import EngineTotals, LoadSample, Run, RunInfo


def run_info(**more: object) -> RunInfo:
    fields: dict[str, object] = {
        "test": "cross-user",
        "policy": "kvasir",
        "engine": "simulated",
        "num_replicas": 2,
        "workload": {"name": "b2b", "qps": 2.5},
        "seed": 1,
        "command": "kvasir loadtest cross-user",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "machine": "2 x CPU, 4 GiB, Python 3.11.7",
        "started_at": "2026-01-02T03:04:05+00:00",
        "warmup_seconds": 5.0,
    }
    return RunInfo(**(fields | more))  # type: ignore[arg-type]


def random_record(rng: random.Random, arrival: float) -> RequestRecord:
    """Some have failed, some say nothing of users, some nothing at all."""
    kind = rng.choice(("whole", "whole", "whole", "no users", "no usage", "failed"))
    cached = rng.randrange(0, 400)
    cross_user = rng.randrange(0, cached + 1)
    has_usage, has_users = kind in ("whole", "no users"), kind == "whole"
    ttft = rng.uniform(0.001, 3.0)
    return RequestRecord(
        arrival_seconds=arrival,
        num_input_tokens=rng.randrange(400, 900),
        num_output_tokens=rng.randrange(1, 50),
        ttft_seconds=None if kind == "failed" else ttft,
        e2e_seconds=ttft + rng.uniform(0, 3),
        num_cached_tokens=cached if has_usage else None,
        num_cross_user_tokens=cross_user if has_users else None,
        num_other_tenant_tokens=rng.choice((0, 0, 7)) if has_users else None,
        replica=None if kind == "failed" else rng.choice("ab"),
        error="timed out" if kind == "failed" else None,
        lateness_seconds=rng.choice((0.0, 0.25)),
        user=f"user-{rng.randrange(9)}",
        tenant=f"tenant-{rng.randrange(3)}",
        reason=rng.choice(("overlap", "affinity")),
        itl_seconds=tuple(rng.uniform(0, 0.1) for _ in range(rng.randrange(4))),
    )


def random_run(seed: int = 1, *, num_requests: int = 60, **info: object) -> Run:
    rng = random.Random(seed)
    arrivals = sorted(rng.uniform(0, 30) for _ in range(num_requests))
    records = tuple(random_record(rng, arrival) for arrival in arrivals)
    samples = tuple(
        LoadSample(float(second), replica, rng.randrange(9), rng.randrange(3), 100, 10, 20, 64)
        for second in range(200)
        for replica in "ab"
    )
    return Run(run_info(seed=seed, **info), records, samples, totals_of(records))


def totals_of(records: tuple[RequestRecord, ...]) -> EngineTotals:
    """What engines would have counted that saw the requests with usage and no others."""
    known = [record for record in records if record.num_cached_tokens is not None]
    return EngineTotals(
        sum(record.num_input_tokens for record in known),
        sum(record.num_cached_tokens or 0 for record in known),
        sum(record.num_cross_user_tokens or 0 for record in known),
    )


def dying(run: Run, num_answered: int, *, cached: int | None = None) -> Run:
    """The same, but of a cluster that answered so many requests and no further ones."""
    lost = (
        replace(each, error="connection refused", num_cached_tokens=cached)
        for each in run.records[num_answered:]
    )
    return replace(run, records=(*run.records[:num_answered], *lost))
