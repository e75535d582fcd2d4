"""`kvasir replay`: which workload, against which cluster, and what to print.

Owns the command's arguments and its conversation with the cluster before the run. Whatever is wrong with them
is a ReplayError with one sentence.
"""

import argparse
import inspect
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvloop

from cluster.commands.refusals import KEY_HINT
from cluster.errors import ClusterError
from loadtests.arguments import count, positive, share
from loadtests.load.closed_loop import ClosedLoop, num_turns, programs_of, within
from loadtests.load.replay import Endpoint, Replay
from loadtests.progress import showing
from loadtests.reports.report import RequestRecord, Slo, make_report
from loadtests.reports.run_file import Run, RunFileError, RunInfo, Surroundings, surroundings, write_run
from loadtests.reports.sessions import SessionFigures, render_sessions, session_figures
from loadtests.reports.table import render
from loadtests.workloads import (
    GENERATORS,
    Workload,
    first_requests,
    first_seconds,
    ideal_hits,
    scale,
    without_longer_than,
)
from loadtests.workloads.prompts import SAMPLE_WORDS, Prompts, token_alphabet
from loadtests.workloads.sessions import SessionFile, is_session_file, read_sessions
from loadtests.workloads.sources import open_workload, typed_parameters

INTERRUPTED = 130

UNTOLD_BLOCK_SIZE = 16
"""Tokens of a block if the server does not say."""


class ReplayError(ClusterError):
    """One sentence for the user who typed the command."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Send a trace or a generated workload to a running cluster, every request at its time, or sessions "
        "of agents, turn by turn, and say what the cache and the router made of it."
    )
    parser.epilog = "generators, and their parameters for --set:\n" + "\n".join(map(_describe, GENERATORS))
    add = parser.add_argument
    add(
        "workload",
        metavar="TRACE",
        help="a .jsonl or .jsonl.gz in Mooncake's format or of sessions, or a generator's name",
    )
    add("--url", help="a router (default: the cluster that runs here)")
    add("--model", metavar="NAME", help="model name (default: the first model)")
    add("--api-key", metavar="KEY", help="the requests' bearer token")
    add("--seed", type=int, default=1, metavar="N", help="another seed, other prompts (default: %(default)s)")
    add(
        "--speed",
        type=positive,
        default=1.0,
        metavar="X",
        help="speed up arrivals, or the pauses of sessions, by this factor",
    )
    add("--qps", type=positive, metavar="X", help="a generator's requests (or sessions) per second")
    add(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a generator's parameter; repeatable"
    )
    add(
        "--limit",
        metavar="N|Ns",
        help="only the first N requests (or sessions of agents), or with 60s, only those sent in 60 s",
    )
    add("--scale-tokens", type=positive, default=1.0, metavar="F", help="shrink prompts and answers (0.1)")
    add("--text", action="store_true", help="send words instead of token ids")
    add("--timeout", type=positive, default=300.0, metavar="S", help="time limit of an answer (default: 300)")
    add(
        "--warm-up",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="share of the beginning that does not count",
    )
    add("--slo-ttft", type=positive, default=2.0, metavar="S", help="TTFT limit of the SLO (default: 2)")
    add("--slo-tpot", type=positive, metavar="S", help="TPOT limit of the SLO (default: none)")
    add("--slo-e2e", type=positive, metavar="S", help="limit of the SLO for a whole answer (default: none)")
    add(
        "--block-size",
        type=count,
        metavar="N",
        help="block size for the ideal (default: the cluster's, or 16 if it does not say)",
    )
    add("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    add(
        "--run-file",
        type=Path,
        metavar="FILE",
        help="write every request's record to this file, for python -m loadtests.reports.page "
        "(.json or .json.gz)",
    )


def run(arguments: argparse.Namespace, url: str, say: Callable[[str], None]) -> int:
    """Replay and report. Returns the exit status. Raises ReplayError."""
    file = _session_file(arguments)
    if file is None:
        return _run_open_loop(arguments, url, say)
    return _run_closed_loop(arguments, file, url, say)


def _run_open_loop(arguments: argparse.Namespace, url: str, say: Callable[[str], None]) -> int:
    workload = scale(_workload(arguments), arguments.speed)
    if workload.has_images:
        raise ReplayError(
            f"{workload.name} has images, and a replay sends completions, which are text: `kvasir simulate`"
            " takes it, and `kvasir loadtest documents` sends images"
        )
    with _client(url, arguments.api_key) as client:
        cluster = _Before(client, arguments.model)
        num_all = len(workload.requests)
        workload = without_longer_than(workload, cluster.context_length)
        _say_left_out(num_all - len(workload.requests), num_all, cluster, say)
        workload = _limited(workload, arguments.limit)
        facts = _facts(arguments, cluster, len(workload.requests))
    prompts = Prompts(cluster.model, workload.block_tokens, arguments.seed, facts.alphabet)
    replay = Replay(_target(url, arguments.api_key), workload, prompts, timeout_seconds=arguments.timeout)
    say(
        f"{workload.name} to {cluster.model} at {url}: {len(workload.requests)} requests in "
        f"{workload.duration_seconds:.0f} s, {workload.num_input_tokens} prompt tokens as {_kind(arguments)}."
    )
    origin = surroundings()
    was_interrupted = _run(replay, len(workload.requests))
    if was_interrupted:
        workload = first_requests(workload, replay.num_sent)
    return _finish(arguments, workload, replay.records, facts, origin, say, was_interrupted=was_interrupted)


def _run_closed_loop(
    arguments: argparse.Namespace, file: SessionFile, url: str, say: Callable[[str], None]
) -> int:
    try:
        typed_parameters(arguments.workload, arguments.qps, arguments.set)
        limit = _number_of_sessions(arguments.limit)
        block_tokens, programs = programs_of(file, scale_tokens=arguments.scale_tokens, limit=limit)
    except ValueError as error:
        raise ReplayError(f"{arguments.workload}: {error}") from error
    with _client(url, arguments.api_key) as client:
        cluster = _Before(client, arguments.model)
        num_all = num_turns(programs)
        programs = within(programs, cluster.context_length)
        num_sent = num_turns(programs)
        _say_left_out(num_all - num_sent, num_all, cluster, say, rest=", or come after one that does")
        facts = _facts(arguments, cluster, num_sent)
    prompts = Prompts(cluster.model, block_tokens, arguments.seed, facts.alphabet)
    loop = ClosedLoop(
        _target(url, arguments.api_key),
        programs,
        prompts,
        speed=arguments.speed,
        timeout_seconds=arguments.timeout,
    )
    main_turns = {each.session.id: len(each.requests) for each in programs if each.session.parent is None}
    say(
        f"{file.name} to {cluster.model} at {url}: {loop.num_lanes} lanes with {len(main_turns)} sessions "
        f"and {len(programs) - len(main_turns)} subagents, {num_sent} turns as {_kind(arguments)}, each sent "
        "when the answer before it has ended."
    )
    origin = surroundings()
    was_interrupted = _run(loop, num_sent)
    sent = Workload(file.name, block_tokens, tuple(loop.sent))
    in_order = [record for _, record in sorted(loop.records.items())]
    figures = session_figures(in_order, main_turns)
    return _finish(
        arguments, sent, loop.records, facts, origin, say, was_interrupted=was_interrupted, sessions=figures
    )


def _say_left_out(
    num_left_out: int, num_all: int, cluster: "_Before", say: Callable[[str], None], *, rest: str = ""
) -> None:
    if num_left_out:
        length = cluster.context_length
        say(f"{num_left_out} of {num_all} requests exceed the context of {length} tokens{rest}.")


@dataclass(frozen=True, slots=True)
class _ReplayFacts:
    """The cluster's answers before a run."""

    alphabet: list[int] | list[str]
    num_replicas: int | None
    block_size: int


def _facts(arguments: argparse.Namespace, cluster: "_Before", num_requests: int) -> _ReplayFacts:
    """Raises ReplayError without a request to send."""
    if not num_requests:
        raise ReplayError("nothing is left to send; --scale-tokens makes prompts smaller")
    alphabet = list(SAMPLE_WORDS) if arguments.text else cluster.alphabet()
    return _ReplayFacts(alphabet, cluster.num_replicas(), arguments.block_size or cluster.block_size)


def _kind(arguments: argparse.Namespace) -> str:
    return "words" if arguments.text else "token ids"


def _finish(
    arguments: argparse.Namespace,
    workload: Workload,
    records: dict[int, RequestRecord],
    facts: _ReplayFacts,
    origin: Surroundings,
    say: Callable[[str], None],
    *,
    was_interrupted: bool,
    sessions: SessionFigures | None = None,
) -> int:
    """Report and keep what was sent. Returns the exit status."""
    status = _report(
        arguments, workload, records, facts, say, was_interrupted=was_interrupted, sessions=sessions
    )
    if arguments.run_file is not None:
        _write_run_file(arguments, workload, records, facts.num_replicas, origin)
    return status


def _write_run_file(
    arguments: argparse.Namespace,
    workload: Workload,
    records: dict[int, RequestRecord],
    num_replicas: int | None,
    origin: Surroundings,
) -> None:
    """The cluster is not ours: its policy, its engine and its counters are not known here."""
    num_warm_up = int(len(workload.requests) * arguments.warm_up)
    info = RunInfo(
        test="replay",
        policy=None,
        engine=None,
        num_replicas=num_replicas,
        workload={"name": workload.name, **_changed(arguments)},
        seed=arguments.seed,
        command=_command_line(sys.argv, arguments.api_key),
        commit=origin.commit,
        machine=origin.machine,
        started_at=origin.started_at,
        warmup_seconds=workload.requests[num_warm_up].arrival_seconds if num_warm_up else 0.0,
    )
    in_order = tuple(record for _, record in sorted(records.items()))
    try:
        write_run(Run(info, in_order, (), None), arguments.run_file)
    except RunFileError as error:
        raise ReplayError(str(error)) from error


def _changed(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the options that change the workload, as given."""
    given = {
        "qps": arguments.qps,
        "set": " ".join(arguments.set) or None,
        "limit": arguments.limit,
        "speed": None if arguments.speed == 1 else arguments.speed,
        "scale_tokens": None if arguments.scale_tokens == 1 else arguments.scale_tokens,
        "text": arguments.text or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _command_line(words: Sequence[str], api_key: str | None) -> str:
    """Return the command as typed, without the key."""
    program, *others = words
    shown = [word.replace(api_key, "KEY") if api_key else word for word in others]
    return shlex.join([Path(program).name, *shown])


def _report(
    arguments: argparse.Namespace,
    workload: Workload,
    records: dict[int, RequestRecord],
    facts: _ReplayFacts,
    say: Callable[[str], None],
    *,
    was_interrupted: bool,
    sessions: SessionFigures | None,
) -> int:
    num_warm_up = int(len(workload.requests) * arguments.warm_up)
    counted = [record for number, record in sorted(records.items()) if number >= num_warm_up]
    slo = Slo(arguments.slo_ttft, arguments.slo_tpot, arguments.slo_e2e)
    report = make_report(counted, slo, num_replicas=facts.num_replicas)
    ideal = ideal_hits(workload, hit_tokens=facts.block_size, warm_up=num_warm_up)
    say(render(report, ideal))
    if sessions is not None:
        say(render_sessions(sessions))
    if arguments.json is not None:
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
            if name not in ("api_key", "command", "json", "run_dir", "run_file")
        }
        content = {
            "workload": workload.name,
            "settings": settings,
            "block_size": facts.block_size,
            "ideal_token_hit_rate": ideal.token_hit_rate,
            "ideal_cross_user_hit_rate": ideal.cross_user_hit_rate,
            "report": report.as_json(),
            **({} if sessions is None else {"sessions": asdict(sessions)}),
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if was_interrupted:
        num_open = len(workload.requests) - len(records)
        say(
            f"Interrupted after {len(workload.requests)} requests; {num_open} had no answer and do not count."
        )
        return INTERRUPTED
    return 0 if report.num_answered else 1


def _run(replay: Replay | ClosedLoop, total: int) -> bool:
    """Whether it was interrupted."""

    def line(seconds: float) -> str:
        records = list(replay.records.values())
        num_failed = sum(record.error is not None for record in records)
        return (
            f"{seconds:6.0f} s  {replay.num_sent} of {total} sent, "
            f"{replay.num_sent - len(records)} in flight, {num_failed} failed"
        )

    try:
        with showing(line):
            uvloop.run(replay.run())
    except KeyboardInterrupt:
        return True
    return False


class _Before:
    """The cluster's state before the run."""

    def __init__(self, client: httpx.Client, model: str | None) -> None:
        self._client = client
        models = self._get("/v1/models")["data"]
        names = [each["id"] for each in models]
        if not names or (model is not None and model not in names):
            raise ReplayError(
                f"no model {model or ''} is served; there are: {', '.join(names) or 'none'}".replace(
                    "  ", " "
                )
            )
        chosen = models[0] if model is None else models[names.index(model)]
        self.model: str = chosen["id"]
        self.context_length: int = chosen.get("max_model_len") or sys.maxsize
        self.block_size: int = chosen.get("block_size") or UNTOLD_BLOCK_SIZE

    def alphabet(self) -> list[int]:
        def tokenize(text: str) -> list[int]:
            body = {"model": self.model, "prompt": text, "add_special_tokens": False}
            tokens: list[int] = _checked(self._client.post("/tokenize", json=body)).json()["tokens"]
            return tokens

        try:
            return token_alphabet(tokenize)
        except (httpx.HTTPError, ReplayError, KeyError, ValueError) as error:
            raise ReplayError(f"the server does not say what its tokens are ({error}); try --text") from error

    def num_replicas(self) -> int | None:
        """None where the server does not count them."""
        try:
            models = self._get("/ready").get("models", {})
        except (ReplayError, ValueError):
            return None
        return models.get(self.model) if isinstance(models, dict) else None

    def _get(self, path: str) -> dict[str, Any]:
        try:
            content: dict[str, Any] = _checked(self._client.get(path)).json()
        except httpx.HTTPError as error:
            raise ReplayError(f"no answer from {self._client.base_url}: {error}") from error
        return content


def _checked(response: httpx.Response) -> httpx.Response:
    if response.status_code == 401:
        raise ReplayError(f"{response.url} answers 401; {KEY_HINT}")
    if response.status_code != 200:
        raise ReplayError(f"status {response.status_code} from {response.url}")
    return response


def _client(url: str, api_key: str | None) -> httpx.Client:
    return httpx.Client(base_url=url, headers=_headers(api_key), timeout=30.0, trust_env=False)


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def _target(url: str, api_key: str | None) -> Endpoint:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise ReplayError(f"a URL looks like http://host:port, not {url}")
    return Endpoint(
        parts.hostname, parts.port or 80, _headers(api_key), parts.path.rstrip("/") + "/v1/completions"
    )


def _workload(arguments: argparse.Namespace) -> Workload:
    name = arguments.workload
    try:
        parameters = typed_parameters(name, arguments.qps, arguments.set)
        return open_workload(name, arguments.seed, parameters, scale_tokens=arguments.scale_tokens)
    except ValueError as error:
        raise ReplayError(str(error)) from error


def _session_file(arguments: argparse.Namespace) -> SessionFile | None:
    """None where the workload is something else."""
    name = arguments.workload
    if name in GENERATORS or not Path(name).is_file():
        return None
    try:
        return read_sessions(name) if is_session_file(name) else None
    except (ValueError, OSError, EOFError) as error:
        raise ReplayError(f"{name}: {error}") from error


def _number_of_sessions(limit: str | None) -> int | None:
    """Raises ValueError."""
    if limit is None or limit.isdecimal():
        return None if limit is None else int(limit)
    raise ValueError(f"--limit takes a number of sessions here, not {limit}; ctrl-C ends a run at any time")


def _limited(workload: Workload, limit: str | None) -> Workload:
    if limit is None:
        return workload
    number = limit.removesuffix("s")
    if not number.isdecimal():
        raise ReplayError(f"--limit takes a number of requests, or of seconds as 60s, not {limit}")
    if limit.endswith("s"):
        return first_seconds(workload, int(number))
    return first_requests(workload, int(number))


def _describe(name: str) -> str:
    generator = GENERATORS[name]
    summary = (inspect.getdoc(generator) or "").splitlines()[0]
    parameters = ", ".join(
        f"{parameter.name}={parameter.default}"
        for parameter in inspect.signature(generator).parameters.values()
        if parameter.name != "seed"
    )
    return f"  {name}: {summary}\n      {parameters}"
