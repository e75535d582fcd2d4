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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvloop

from cluster.commands.refusals import KEY_HINT
from cluster.errors import ClusterError
from loadtests.arguments import count, positive, share
from loadtests.load.replay import Endpoint, Replay
from loadtests.progress import showing
from loadtests.reports.report import RequestRecord, Slo, make_report
from loadtests.reports.run_file import Run, RunFileError, RunInfo, Surroundings, surroundings, write_run
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
from loadtests.workloads.sources import open_workload, typed_parameters

INTERRUPTED = 130

UNTOLD_BLOCK_SIZE = 16
"""Tokens of a block if the server does not say."""


class ReplayError(ClusterError):
    """One sentence for the user who typed the command."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Send a trace or a generated workload to a running cluster, every request at its time, and say "
        "what the cache and the router made of it."
    )
    parser.epilog = "generators, and their parameters for --set:\n" + "\n".join(map(_describe, GENERATORS))
    add = parser.add_argument
    add("workload", metavar="TRACE", help="a .jsonl or .jsonl.gz in Mooncake's format, or a generator's name")
    add("--url", help="a router (default: the cluster that runs here)")
    add("--model", metavar="NAME", help="model name (default: the first model)")
    add("--api-key", metavar="KEY", help="the requests' bearer token")
    add("--seed", type=int, default=1, metavar="N", help="another seed, other prompts (default: %(default)s)")
    add("--speed", type=positive, default=1.0, metavar="X", help="speed up arrivals by this factor")
    add("--qps", type=positive, metavar="X", help="a generator's requests (or sessions) per second")
    add(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a generator's parameter; repeatable"
    )
    add(
        "--limit",
        metavar="N|Ns",
        help="only the first N requests, or with 60s, only those sent in the first 60 s",
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
    workload = scale(_workload(arguments), arguments.speed)
    if workload.has_images:
        raise ReplayError(
            f"{workload.name} has images, and a replay sends completions, which are text: `kvasir simulate`"
            " takes it, and `kvasir loadtest documents` sends images"
        )
    with _client(url, arguments.api_key) as client:
        cluster = _Cluster(client, arguments.model)
        num_all = len(workload.requests)
        workload = without_longer_than(workload, cluster.context_length)
        if num_left_out := num_all - len(workload.requests):
            say(
                f"{num_left_out} of {num_all} requests exceed the context of {cluster.context_length} tokens."
            )
        workload = _limited(workload, arguments.limit)
        if not workload.requests:
            raise ReplayError("nothing is left to send; --scale-tokens makes prompts smaller")
        alphabet = list(SAMPLE_WORDS) if arguments.text else cluster.alphabet()
        num_replicas, block_size = cluster.num_replicas(), arguments.block_size or cluster.block_size
    prompts = Prompts(cluster.model, workload.block_tokens, arguments.seed, alphabet)
    replay = Replay(_target(url, arguments.api_key), workload, prompts, timeout_seconds=arguments.timeout)
    kind = "words" if arguments.text else "token ids"
    say(
        f"{workload.name} to {cluster.model} at {url}: {len(workload.requests)} requests in "
        f"{workload.duration_seconds:.0f} s, {workload.num_input_tokens} prompt tokens as {kind}."
    )
    origin = surroundings()
    was_interrupted = _run(replay, len(workload.requests))
    if was_interrupted:
        workload = first_requests(workload, replay.num_sent)
    status = _report(
        arguments,
        workload,
        replay.records,
        num_replicas,
        block_size,
        say,
        was_interrupted=was_interrupted,
    )
    if arguments.run_file is not None:
        _write_run_file(arguments, workload, replay.records, num_replicas, origin)
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
    num_replicas: int | None,
    block_size: int,
    say: Callable[[str], None],
    *,
    was_interrupted: bool,
) -> int:
    num_warm_up = int(len(workload.requests) * arguments.warm_up)
    counted = [record for number, record in sorted(records.items()) if number >= num_warm_up]
    slo = Slo(arguments.slo_ttft, arguments.slo_tpot, arguments.slo_e2e)
    report = make_report(counted, slo, num_replicas=num_replicas)
    ideal = ideal_hits(workload, hit_tokens=block_size, warm_up=num_warm_up)
    say(render(report, ideal))
    if arguments.json is not None:
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
            if name not in ("api_key", "command", "json", "run_dir", "run_file")
        }
        content = {
            "workload": workload.name,
            "settings": settings,
            "block_size": block_size,
            "ideal_token_hit_rate": ideal.token_hit_rate,
            "ideal_cross_user_hit_rate": ideal.cross_user_hit_rate,
            "report": report.as_json(),
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if was_interrupted:
        num_open = len(workload.requests) - len(records)
        say(
            f"Interrupted after {len(workload.requests)} requests; {num_open} had no answer and do not count."
        )
        return INTERRUPTED
    return 0 if report.num_answered else 1


def _run(replay: Replay, total: int) -> bool:
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


class _Cluster:
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
