"""What a report says of the time before, just after and after replicas were killed."""

from dataclasses import replace

import pytest

from loadtests.named.summary import phase_table, table
from loadtests.reports.comparison import PHASE_HEADS, compare, phase_rows
from loadtests.reports.html_page import page
from loadtests.reports.markdown import markdown
from loadtests.reports.phases import AFTERMATH_SECONDS, phases_of
from loadtests.reports.report import RequestRecord, Slo
from loadtests.reports.run_file import Run
from tests.loadtests.run_builder import run_info

SLO = Slo()


def record(
    at: float, *, cached: int = 0, host: int = 0, disk: int = 0, error: str | None = None
) -> RequestRecord:
    return RequestRecord(
        arrival_seconds=at,
        num_input_tokens=100,
        num_output_tokens=3,
        ttft_seconds=None if error else 0.5,
        e2e_seconds=1.0,
        num_cached_tokens=None if error else cached,
        num_cross_user_tokens=None if error else cached,
        num_host_tokens=None if error else host,
        num_disk_tokens=None if error else disk,
        replica="a",
        error=error,
    )


def run_of(*records: RequestRecord, cluster: str = "", kills: tuple[float, ...] = (30.0,)) -> Run:
    return Run(run_info(cluster=cluster, kill_seconds=kills), records, (), None)


def test_each_request_is_of_the_phase_in_which_it_was_to_be_sent() -> None:
    run = run_of(
        record(1.0, cached=90),  # the warm-up
        record(6.0, cached=10),
        record(29.9, cached=30),
        record(30.0, error="timed out"),
        record(30.0 + AFTERMATH_SECONDS - 0.1, cached=50),
        record(30.0 + AFTERMATH_SECONDS, cached=80),
    )
    phases = phases_of(run, SLO)
    assert [(each.name, each.report.num_requests) for each in phases] == [
        ("before", 2),
        ("just after", 2),
        ("later", 1),
    ]
    assert [each.report.token_hit_rate for each in phases] == [0.2, 0.5, 0.8]


def test_the_report_says_from_which_tier_the_hits_of_each_phase_came() -> None:
    tiered = run_of(
        record(10.0, cached=60, host=20, disk=10),
        record(31.0, cached=50, host=0, disk=50),
        cluster="RAM and disk",
    )
    plain = run_of(record(10.0, cached=25), record(31.0), cluster="device only")
    (run_set,) = compare([("one", plain), ("two", tiered)], SLO)
    rows = {(row[0], row[1]): row[4:8] for row in phase_rows(run_set)}
    assert rows == {
        ("before", "kvasir, device only"): ["25.0 %", "25.0 %", "0.0 %", "0.0 %"],
        ("just after", "kvasir, device only"): ["0.0 %", "0.0 %", "0.0 %", "0.0 %"],
        ("before", "kvasir, RAM and disk"): ["60.0 %", "30.0 %", "20.0 %", "10.0 %"],
        ("just after", "kvasir, RAM and disk"): ["50.0 %", "0.0 %", "0.0 %", "50.0 %"],
    }
    assert all(len(row) == len(PHASE_HEADS) for row in phase_rows(run_set))
    assert "Before and after the kills" in page([run_set], SLO)
    assert "| just after | kvasir, RAM and disk | 1 | 0 | 50.0 % | 0.0 % | 0.0 % | 50.0 % |" in markdown(
        [run_set]
    )
    said = phase_table(run_set)
    assert said is not None and "in host memory" in said
    shown = [line.split() for line in table(run_set).splitlines()]
    assert ["Hit", "on", "disk", "–", "30.0", "%"] in [line[:6] for line in shown]


@pytest.mark.parametrize("field", ["num_host_tokens", "num_disk_tokens"])
def test_a_run_of_a_server_that_says_nothing_of_tiers_reads_as_device_only(field: str) -> None:
    run = run_of(replace(record(10.0, cached=60), **{field: None}))  # type: ignore[arg-type]
    (phase,) = phases_of(run, SLO)
    assert phase.report.origins.num_device_tokens == 60
