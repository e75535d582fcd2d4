import gzip
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from loadtests.reports.report import RequestRecord
from loadtests.reports.run_file import (
    EngineTotals,
    LoadSample,
    Run,
    RunFileError,
    RunInfo,
    commit_of,
    read_run,
    write_run,
)

INFO = RunInfo(
    test="cross-user",
    policy="kvasir",
    engine=None,
    num_replicas=2,
    workload={"name": "b2b", "qps": 2.5, "nested": {"tenants": [1, 2]}},
    seed=7,
    command="kvasir loadtest cross-user",
    commit="",
    machine="2 x CPU",
    started_at="2026-01-02T03:04:05+00:00",
    warmup_seconds=5.0,
    notes=("a", "</script>"),
    cluster="RAM and disk",
    kill_seconds=(30.0, 45.5),
)
FULL = RequestRecord(
    arrival_seconds=1.25,
    num_input_tokens=100,
    num_output_tokens=3,
    ttft_seconds=0.1 + 0.2,
    e2e_seconds=1.5,
    num_cached_tokens=40,
    num_cross_user_tokens=10,
    predicted_tokens=48,
    replica="a",
    lateness_seconds=0.001,
    user="u",
    tenant="t",
    session="s",
    reason="overlap",
    num_own_tokens=30,
    num_other_tenant_tokens=0,
    num_host_tokens=9,
    num_disk_tokens=5,
    itl_seconds=(0.01, 1e-9),
    request_id="r",
    num_images=2,
    num_image_tokens=90,
)
BARE = RequestRecord(arrival_seconds=2, num_input_tokens=1, error="timed out")
TOTALS = EngineTotals(101, 40, 10, 9, 5, 2, 700, 90)
RUN = Run(INFO, (FULL, BARE), (LoadSample(1.0, "a", 1, 2, 3, 4, 5, 6),), TOTALS)
EMPTY = Run(INFO, (), (), None)


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
@pytest.mark.parametrize("run", [RUN, EMPTY])
def test_a_run_is_read_as_it_was_written(tmp_path: Path, run: Run, name: str) -> None:
    write_run(run, tmp_path / name)
    assert read_run(tmp_path / name) == run
    assert os.listdir(tmp_path) == [name]


def changed(**change: Any) -> bytes:
    records = {"columns": ["arrival_seconds", "num_input_tokens"], "rows": [[1.0, 2]]}
    info = {name: getattr(INFO, name) for name in RunInfo.__slots__}
    content = {"format": "kvasir-run", "version": 1, "info": info, "records": records}
    content |= {"samples": {"columns": [], "rows": []}, "engine_totals": None}
    return json.dumps(content | change).encode()


BAD = {
    "empty": b"",
    "text": b"hello",
    "binary": bytes(range(128, 256)),
    "cut": changed()[:-40],
    "list": b"[]",
    "foreign": b'{"report": {}}',
    "newer": changed(version=2),
    "no info": changed(info=None),
    "incomplete info": changed(info={"test": "a"}),
    "unknown column": changed(
        records={"columns": ["arrival_seconds", "num_input_tokens", "x"], "rows": [[1, 2, 3]]}
    ),
    "missing column": changed(records={"columns": ["arrival_seconds"], "rows": [[1]]}),
    "short row": changed(records={"columns": ["arrival_seconds", "num_input_tokens"], "rows": [[1]]}),
    "long row": changed(records={"columns": ["arrival_seconds", "num_input_tokens"], "rows": [[1, 2, 3]]}),
    "a text for a number": changed(
        records={"columns": ["arrival_seconds", "num_input_tokens"], "rows": [[1, "2"]]}
    ),
    "a truth for a number": changed(
        records={"columns": ["arrival_seconds", "num_input_tokens"], "rows": [[1, True]]}
    ),
    "a fraction of a token": changed(
        records={"columns": ["arrival_seconds", "num_input_tokens"], "rows": [[1, 2.5]]}
    ),
    "no rows": changed(records={"columns": []}),
    "rows in an object": changed(records={"columns": [], "rows": {}}),
    "no records": changed(records=None),
    "totals in a list": changed(engine_totals=[1, 2, 3]),
    "not a number": changed().replace(b"1.0", b"NaN"),
    "infinite": changed().replace(b"1.0", b"1e999"),
    "deep": b"[" * 100_000,
    "gzip cut": gzip.compress(changed())[:-20],
    "gzip damaged": gzip.compress(changed())[:12] + b"\xff" * 50,
    "gzip of text": gzip.compress(b"hello"),
}


def test_the_file_that_the_bad_ones_are_made_from_is_good(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(changed())
    assert len(read_run(tmp_path / "run.json").records) == 1


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_one_sentence_with_its_name(tmp_path: Path, what: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(BAD[what])
    with pytest.raises(RunFileError) as caught:
        read_run(path)
    assert str(caught.value).startswith(f"{path} ")
    assert "\n" not in str(caught.value)


def test_a_commit_tells_of_edits_and_nothing_is_known_outside_of_git(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("1\n")
    assert commit_of(source) == ""
    for arguments in (
        "init",
        "add source.py",
        "-c user.name=a -c user.email=a@localhost commit -m first",
    ):
        subprocess.run(["git", *arguments.split()], cwd=tmp_path, check=True, capture_output=True)
    clean = commit_of(source)
    assert re.fullmatch("[0-9a-f]{40}", clean)
    installed = tmp_path / "installed.py"
    installed.write_text("1\n")
    assert commit_of(installed) == "", "it lies in the folder, and is no part of the repository"
    source.write_text("2\n")
    assert commit_of(source) == clean + "+edits"
