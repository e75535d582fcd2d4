"""The file of one load test run: JSON, how it is written and read.

Owns the format and the run's origin: commit, machine, time. Every defect of a file is a RunFileError with one
sentence.
"""

import dataclasses
import gzip
import json
import os
import platform
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from loadtests.figures import commit_of, processor
from loadtests.reports.report import RequestRecord

FORMAT = "kvasir-run"
VERSION = 1
Row = TypeVar("Row")
GZIP_MAGIC = b"\x1f\x8b"


class RunFileError(Exception):
    """One sentence for the user who named the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The run's configuration. None is unknown."""

    test: str
    policy: str | None
    engine: str | None
    num_replicas: int | None
    workload: dict[str, object]
    """Its name and parameters."""
    seed: int
    command: str
    commit: str
    """Empty if not known; ends in "+edits" if tracked files had changed."""
    machine: str
    started_at: str
    """ISO 8601, UTC."""
    warmup_seconds: float
    """Requests scheduled earlier are recorded, and not counted."""
    notes: tuple[str, ...] = ()
    cluster: str = ""
    """How the cluster differs from the test's others, in words."""
    kill_seconds: tuple[float, ...] = ()
    """Times of kills, after the start."""


@dataclass(frozen=True, slots=True)
class LoadSample:
    """One replica's report, `seconds` after the start of the run."""

    seconds: float
    replica: str
    num_running: int
    num_waiting: int
    num_pending_tokens: int
    num_used_blocks: int
    num_cached_blocks: int
    num_total_blocks: int


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """Growth of the replicas' own counters over the run, summed."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_cross_user_tokens: int
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_images: int = 0
    """Images received from routers."""
    num_image_bytes: int = 0
    num_encoded_image_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Records are of all requests, warm-up included; `engine_totals` is None if unreadable."""

    info: RunInfo
    records: tuple[RequestRecord, ...]
    samples: tuple[LoadSample, ...]
    engine_totals: EngineTotals | None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Fields of RunInfo about a run's origin."""

    commit: str
    machine: str
    started_at: str


@dataclass(frozen=True, slots=True)
class _RunTable:
    """Dataclasses of one kind: their field names once, and a row of values for each."""

    columns: tuple[str, ...]
    rows: list[list[Any]]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A run in the file's form."""

    info: RunInfo
    records: _RunTable
    samples: _RunTable
    engine_totals: EngineTotals | None


def surroundings() -> Surroundings:
    """Read the present environment; call it when the run starts."""
    return Surroundings(
        commit_of(Path(__file__)), _machine(), datetime.now(UTC).isoformat(timespec="seconds")
    )


def _machine() -> str:
    gibibytes = psutil.virtual_memory().total / 2**30
    return f"{os.cpu_count()} x {processor()}, {gibibytes:.0f} GiB, Python {platform.python_version()}"


def write_run(run: Run, path: Path) -> None:
    """Write atomically; compressed if the name ends in .gz."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "info": dataclasses.asdict(run.info),
        "records": _columns(RequestRecord, run.records),
        "samples": _columns(LoadSample, run.samples),
        "engine_totals": None if run.engine_totals is None else dataclasses.asdict(run.engine_totals),
    }
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    unfinished = path.with_name(path.name + ".part")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    except OSError as error:
        raise RunFileError(f"{path} cannot be written: {error.strerror}") from error


def read_run(path: Path) -> Run:
    """Read a run. Raises RunFileError."""
    try:
        data = path.read_bytes()
        if data.startswith(GZIP_MAGIC):
            data = gzip.decompress(data)
        content = msgspec.json.decode(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RunFileError(f"{path} is cut short or damaged") from error
    except OSError as error:
        raise RunFileError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RunFileError(f"{path} is not JSON, or is cut short") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RunFileError(f"{path} is not a run file")
    if content.get("version") != VERSION:
        raise RunFileError(f"{path} has version {content.get('version')}, and this program reads {VERSION}")
    try:
        kept = msgspec.convert(content, _Kept)
        records, samples = _rows(RequestRecord, kept.records), _rows(LoadSample, kept.samples)
        return Run(kept.info, records, samples, kept.engine_totals)
    except ValueError as error:
        raise RunFileError(f"{path} does not hold a whole run: {error}") from error


def _columns(kind: type[Any], values: tuple[Any, ...]) -> dict[str, object]:
    """Leave out columns in which every value is the field's default."""
    fields = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING
        or any(getattr(value, field.name) != field.default for value in values)
    ]
    return {"columns": fields, "rows": [[getattr(value, name) for name in fields] for value in values]}


def _rows(kind: type[Row], content: _RunTable) -> tuple[Row, ...]:
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := set(content.columns) - names:
        raise ValueError(f"{kind.__name__} has no field {min(unknown)}")
    rows = [dict(zip(content.columns, row, strict=True)) for row in content.rows]
    return msgspec.convert(rows, tuple[kind, ...])  # type: ignore[valid-type]
