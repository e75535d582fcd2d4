"""kvasir why: why one request's prompt was, or was not, read from cache, in words.

Owns the words. The router found the facts when it served the request. It tells them to the tenant of the
request, and to operators who name the tenant.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import httpx

from cluster.commands.explain import IN_BYTES, split_lines
from cluster.commands.refusals import KEY_VARIABLE, refused
from cluster.errors import ClusterError
from router.explain.findings import sentence_of
from router.misses import Cause, MissedSpan, losses

CHANGES = {
    "model": "another model",
    "adapter": "another adapter",
    "model_version": "another version of the model",
    "cache_salt": "another cache_salt",
    "template_arguments": "other arguments of the chat template",
    "tools": "other tools",
    "tool_keys": "the keys of a tool in another order",
    "system": "another system text",
    "messages": "other messages",
    "output_format": "another format of the answer",
    "template": "what the chat template writes",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id", metavar="ID", help="of a request (x-request-id) or of an answer (chatcmpl-…, resp_…, msg_…)"
    )
    parser.add_argument(
        "--tenant", metavar="NAME", help="for operators: whose request it was (default: your own tenant's)"
    )
    parser.add_argument(
        "--url",
        help="a router, for --tenant at its admin port if it has one (default: that of the cluster that runs"
        f" here); a key is taken from {KEY_VARIABLE}",
    )
    parser.add_argument("--json", action="store_true", help="print the router's answer as JSON")


def why(arguments: argparse.Namespace, url: str, key: str | None, say: Callable[[str], None]) -> int:
    """Run the command. With a tenant, `url` is the router's address for operators. Raises ClusterError."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    whose = "v1/cache/explain" if arguments.tenant is None else f"explain/tenants/{_quoted(arguments.tenant)}"
    try:
        path = f"{url}/{whose}/{_quoted(arguments.id)}"
        answer = httpx.get(path, headers=headers, timeout=60.0, trust_env=False)
        if answer.is_error:
            raise refused(f"{url} answers {answer.status_code}", answer, _hint(answer.status_code, arguments))
        found: dict[str, Any] = answer.json()
        say(json.dumps(found, indent=2) if arguments.json else "\n".join(render(found)))
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ClusterError(f"{url} did not explain it: {error!r}") from error
    return 0


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _hint(status: int, arguments: argparse.Namespace) -> str | None:
    if status == 404 and arguments.tenant is None:
        return "--tenant NAME asks for another tenant's, if you may"
    return None


def render(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{found['answer_id'] or found['request_id']}: {found['model']}, {found['route']}"
    if found.get("unit") == "bytes":
        yield f"  {IN_BYTES}"
    if found["error"] is not None:
        yield f"  ended with {found['error']}"
    several = len(found["prompts"]) > 1
    for number, prompt in enumerate(found["prompts"]):
        if several:
            yield f"prompt {number}:"
        yield from _prompt(prompt)


def program_lines(program: Mapping[str, Any], replica: str | None) -> Iterator[str]:
    agent = f', agent "{program["agent"]}"' if program["agent"] else ""
    name = f'program "{program["session"]}" of {program["source"]}, by {program["field"]}{agent}'
    if program["is_side_call"]:
        yield f"  a call beside the turns of {name}"
        return
    yield f"  turn {program['turn']:,} of {name}"
    home, beyond = program["home"], program["tokens_beyond_room"]
    if home is None:
        yield "  it had no home yet"
    elif home == replica:
        yield f"  at its program's home, {home}"
    else:
        why = f": live programs need {beyond:,} tokens more than it has room for" if beyond else ""
        yield f"  it left its program's home, {home}{why}"
    if program["waited_seconds"]:
        number = program["programs_admitted"]
        others = f"{number:,} program{'s' * (number != 1)} had all the room"
        yield f"  waited {program['waited_seconds']:,.1f} s until its program might run: {others}"


def _prompt(prompt: Mapping[str, Any]) -> Iterator[str]:
    if prompt.get("program") is not None:
        yield from program_lines(prompt["program"], prompt["replica"])
    yield from (f"  expected cost, {line}" for line in split_lines(prompt.get("split")))
    cached, length = prompt["cached_tokens"], prompt["prompt_tokens"]
    at = f" at {prompt['replica']}" if prompt["replica"] else ""
    if cached is None:
        yield f"  {prompt['outcome']}: the engine{at} does not say how many of {length:,} tokens were cached"
        yield from _nearest(prompt)
        return
    yield f"  {prompt['outcome']}: {cached:,} of {length:,} tokens were read from cache{at}"
    tiers = {tier: count for tier, count in prompt["cached_tokens_by_tier"].items() if count}
    if cached and set(tiers) != {"device"}:
        yield "  " + ", ".join(f"{count:,} from {tier}" for tier, count in tiers.items())
    spans = [
        MissedSpan(Cause(span["cause"]), span["start"], span["end"], span["replica"], span["at"])
        for span in prompt["spans"]
    ]
    block_size = prompt.get("block_size", 0)
    for missed in spans:
        yield f"  tokens {missed.start + 1:,} to {missed.end:,} {sentence_of(missed, None, block_size)}"
    yield from _nearest(prompt)
    if prompt["lost_tokens"]:
        cost = "" if prompt["lost_ms"] is None else f", {prompt['lost_ms']:,.0f} ms of computation"
        lost = losses(spans)
        parts = ", ".join(f"{num:,} {cause}" for cause, num in lost.items()) if len(lost) > 1 else ""
        yield f"  lost: {prompt['lost_tokens']:,} tokens{cost}{parts and f'; {parts}'}"


def _nearest(prompt: Mapping[str, Any]) -> Iterator[str]:
    nearest, place = prompt["nearest"], prompt["place"]
    if nearest is None:
        yield "  no earlier prompt is remembered that is like it"
        return
    name = nearest["answer_id"] or nearest["request_id"] or "a request with another cache_salt"
    yield f"  nearest: {name}, {nearest['seconds_before']:,.1f} s before, {nearest['prompt_tokens']:,} tokens"
    if nearest["diverges_at"] is not None:
        yield f"  they part at token {nearest['diverges_at'] + 1:,}"
    elif nearest["common_tokens"] is not None:
        yield f"  it goes on from all of that: {nearest['common_tokens']:,} tokens"
    if place is not None and place["path"]:
        sure = "" if place["is_certain"] else ", or next to it"
        what = ", the keys there" if place["kind"] == "keys" else ""
        yield f"  in your request: {place['path']}{what}{sure}"
        if place.get("sentence"):
            yield f"  {place['sentence']}"
    if nearest["changed"]:
        yield "  it has " + ", ".join(CHANGES.get(name, name) for name in nearest["changed"])
