"""kvasir usage: what tenants and keys used, what came from cache, and what that saved.

Owns the question and the table. The router sums over all routers.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from cluster.commands.refusals import KEY_VARIABLE, refused
from cluster.commands.tables import align
from cluster.errors import ClusterError

_HEADER = (
    *("REQUESTS", "PROMPT", "CACHED", "SHARE", "DEVICE", "HOST", "DISK"),
    *("WRITTEN", "OUTPUT", "COST", "SAVED"),
)
_SPAN = re.compile(r"([0-9]{1,6})([hd])")
_HOURS = {"h": 1, "d": 24}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--since",
        default="24h",
        metavar="WHEN",
        help="hours or days back (6h, 7d), or a time as 2026-07-01T12:00 in UTC (default: %(default)s)",
    )
    parser.add_argument(
        "--by",
        action="append",
        choices=("key", "model"),
        default=[],
        help="a line for each key, or each model, of a tenant; repeatable",
    )
    parser.add_argument(
        "--tenant", metavar="NAME", help="one tenant alone, for keys that may see all of them"
    )
    parser.add_argument(
        "--url",
        help=f"a router (default: that of the cluster that runs here); a key is taken from {KEY_VARIABLE}",
    )
    parser.add_argument("--json", action="store_true", help="print the router's answer as JSON")


def usage(
    arguments: argparse.Namespace, url: str, key: str | None, now: float, say: Callable[[str], None]
) -> int:
    """Run the command; `now` is in seconds since 1970. Raises ClusterError."""
    query = {"start": _start(arguments.since, now), "bucket": "day", "group_by": arguments.by}
    if arguments.tenant is not None:
        query["tenant"] = arguments.tenant
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{url}/v1/usage", params=query, headers=headers, timeout=60.0, trust_env=False)
        if answer.is_error:
            raise refused(f"{url} answers {answer.status_code}", answer)
        found: dict[str, Any] = answer.json()
        say(json.dumps(found, indent=2) if arguments.json else render(found, arguments.by))
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ClusterError(f"{url} did not say what was used: {error!r}") from error
    return 0


def _start(since: str, now: float) -> str:
    """Convert a duration for the router; pass everything else on unchanged."""
    span = _SPAN.fullmatch(since)
    if span is None:
        return since
    return str(max(0, int(now) - int(span[1]) * _HOURS[span[2]] * 3600))


def render(found: Mapping[str, Any], by: Sequence[str]) -> str:
    """Format a line per tenant, or per key and model, and a total."""
    names = ["tenant", *(f"{each}_id" if each == "key" else each for each in ("key", "model") if each in by)]
    sums: dict[tuple[str, ...], dict[str, float]] = {}
    for row in found["data"]:
        who = tuple(row[name] or "-" for name in names)
        total = sums.setdefault(who, {})
        for name, number in _numbers(row).items():
            total[name] = total.get(name, 0) + number
    if not sums:
        return "Nothing was used in that time."
    titles = [name.removesuffix("_id").upper() for name in names]
    rows = [[*titles, *_HEADER], *([*who, *_cells(sums[who])] for who in sorted(sums))]
    if len(sums) > 1:
        rows.append(["all", *[""] * (len(names) - 1), *_cells(_numbers(found["total"]))])
    return "\n".join(align(rows))


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    prompt = ("prompt_tokens", "unreported_tokens", "cached_tokens", "written_tokens")
    names = ("requests", *prompt, "output_tokens", "cost", "saved")
    tiers: dict[str, float] = row["cached_tokens_by_tier"]
    return {**{name: row[name] for name in names}, **tiers}


def _cells(total: Mapping[str, float]) -> list[str]:
    prompt, cached = total["prompt_tokens"], total["cached_tokens"]
    reported = prompt - total["unreported_tokens"]
    share = f"{cached / reported:.0%}" if reported else "-"
    whole = [f"{total['requests']:,.0f}", f"{prompt:,.0f}", f"{cached:,.0f}", share]
    rest = ("device", "host", "disk", "written_tokens", "output_tokens", "cost", "saved")
    return [*whole, *(f"{total[name]:,.0f}" for name in rest)]
