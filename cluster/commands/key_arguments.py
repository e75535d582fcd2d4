"""Parses the arguments of `kvasir keys`."""

import argparse
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from router.caller import Limits, Right

_DURATION = re.compile(r"(\d{1,6})([dhm])")
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}


def add_arguments(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=type(parser))
    place = argparse.ArgumentParser(add_help=False, parents=[common])
    place.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="the file of tenants and keys (default: that of the cluster that runs here)",
    )
    place.add_argument("--redis-url", metavar="URL", help="the keys in this Redis, for `keys_in_redis`")
    place.add_argument("--secret-file", metavar="FILE", help="with --redis-url: the routers' cluster secret")

    def add(name: str, what: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, parents=[place], allow_abbrev=False, help=what, description=what)

    create = add("create", "make a key and print it, this once")
    create.add_argument("--tenant", required=True, metavar="NAME", help="whose key it is")
    create.add_argument("--name", metavar="TEXT", help="what people call the key")
    create.add_argument(
        "--right",
        action="append",
        default=[],
        choices=[right.value for right in Right],
        help="what it allows beyond asking for answers; repeatable",
    )
    create.add_argument(
        "--expires",
        metavar="WHEN",
        help="a day such as 2027-01-31 (its end, UTC), or a time from now: 90d, 12h",
    )
    _add_limits(create)
    show = actions.add_parser(
        "list", parents=[place], help="show tenants and keys, which no secret is part of"
    )
    show.add_argument("--tenant", metavar="NAME", help="of one tenant alone")
    show.add_argument("--json", action="store_true", help="print them as JSON")
    revoke = add("revoke", "revoke keys: requests with them are refused from then on")
    revoke.add_argument("key_ids", nargs="+", metavar="KEY_ID", help="12 hex digits, as `list` shows them")
    tenant = add("tenant", "declare a tenant, change it, or remove it")
    tenant.add_argument("tenant", metavar="NAME", help="its name")
    tenant.add_argument(
        "--group",
        action="append",
        metavar="NAME",
        help="a group of tenants that share KV, the default one first; repeatable, `none` for no group",
    )
    tenant.add_argument(
        "--weight", type=float, help="its part of an overloaded fleet, beside others (default: 1)"
    )
    tenant.add_argument(
        "--slo-seconds", type=float, metavar="SECONDS", help="time to the first token that is of use to it"
    )
    _add_limits(tenant)
    tenant.add_argument("--remove", action="store_true", help="remove it with all its keys")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    for name, what in {
        "requests-per-minute": "most requests in a minute",
        "tokens-per-minute": "most tokens of prompts and answers in a minute",
        "max-sequences": "most sequences at a time",
        "max-context": "most tokens of a prompt and its answer",
    }.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=what)
    for name, what in {"lease-share": "the room for leases", "store-share": "the KV store"}.items():
        parser.add_argument(f"--{name}", type=float, metavar="SHARE", help=f"its part of {what}, up to 1")


def given_limits(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Return the limits on the command line."""
    values = {name: getattr(arguments, name) for name in Limits.__struct_fields__}
    return {name: value for name, value in values.items() if value is not None}


def read_moment(text: str, now: datetime) -> datetime:
    """Parse a point in time or a duration from now. Raises ValueError."""
    duration = _DURATION.fullmatch(text)
    if duration is not None:
        return now + timedelta(**{_UNITS[duration[2]]: int(duration[1])})
    if len(text) == len("2027-01-31"):
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC) + timedelta(days=1)
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
