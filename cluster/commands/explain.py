"""kvasir explain: where the router would send a prompt now, and why, without sending it.

Owns the question and the table. The router decides, with the code that decides for requests.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx

from cluster.commands.refusals import refused
from cluster.commands.running import key_headers
from cluster.commands.tables import align
from cluster.errors import ClusterError

MOST_RANKS = 8

IN_BYTES = (
    "counted in bytes: the model's tokenizer is not known here, so a token below is a byte of the prompt"
)

_HEADER = ("REPLICA", "RANK", "OVERLAP", "REQUESTS", "PENDING", "WAIT", "PREFILL", "DELAY", "ROOM", "COST")

_TIERS = ("DEVICE", "HOST", "DISK", "MOVE")


def explain(arguments: argparse.Namespace, url: str, say: Callable[[str], None]) -> int:
    """Run the command. Raises ClusterError."""
    explained = ask_router(arguments, url)
    say(json.dumps(explained, indent=2) if arguments.json else render(explained))
    return 0


def ask_router(arguments: argparse.Namespace, url: str) -> dict[str, Any]:
    """Ask the router to explain the prompt of a command line. Raises ClusterError."""
    path, body = _request(arguments)
    headers = key_headers(arguments)
    with httpx.Client(base_url=url, headers=headers, timeout=30.0, trust_env=False) as client:
        if "model" not in body:
            body["model"] = _first_model(client)
        try:
            response = client.post("/explain" + path, json=body)
            if response.is_error:
                raise refused(f"{url} answers {response.status_code}", response)
            prompts: list[dict[str, Any]] = response.json()["prompts"]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise ClusterError(f"{url} gave no explanation: {error!r}") from error
    if len(prompts) != 1:
        raise ClusterError(f"the request has {len(prompts)} prompts; ask for one at a time")
    return prompts[0]


def _first_model(client: httpx.Client) -> str:
    """Return the first model. Works on both ports of a router; the admin port has no list of models."""
    try:
        models: dict[str, int] = client.get("/ready").json()["models"]
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ClusterError(f"{client.base_url} does not say which models it serves: {error!r}") from error
    if not models:
        raise ClusterError(f"{client.base_url} serves no model yet")
    return next(iter(models))


def render(explained: Mapping[str, Any]) -> str:
    num_tokens, block_size = explained["num_tokens"], explained["block_size"]
    order = explained["affinity_order"]
    more = f" and {len(order) - MOST_RANKS} more" if len(order) > MOST_RANKS else ""
    adapter = f" with {explained['adapter']}" if explained["adapter"] else ""
    candidates = explained["candidates"]
    is_sparse = explained.get("resume_points") is not None
    has_tiers = any(candidate.get("tiers") for candidate in candidates)
    rows = [_header(is_sparse=is_sparse, has_tiers=has_tiers)]
    rows += [_row(candidate, is_sparse=is_sparse, has_tiers=has_tiers) for candidate in candidates]
    sentences = [tiers["sentence"] for candidate in candidates if (tiers := candidate.get("tiers"))]
    decision = explained["decision"]
    cached = decision["overlap_tokens"]
    size = f"{num_tokens} tokens, {num_tokens // block_size} full blocks of {block_size}"
    lines = [
        f"{explained['model']}{adapter}: {size}",
        *([IN_BYTES] if explained.get("unit") == "bytes" else []),
        f"bucket {explained['bucket']}, affinity order {', '.join(order[:MOST_RANKS])}{more}",
        "",
        *align(rows),
        "",
        *(f"{sentence}." for sentence in sentences if sentence),
        *_predicted(candidates),
        *(f"Expected cost, {line}." for line in split_lines(explained.get("split"))),
        f"It would go to {decision['replica']} with {cached} tokens cached: {decision['because']}.",
    ]
    return "\n".join(lines)


def split_lines(split: Mapping[str, Any] | None) -> Iterator[str]:
    """Write both choices of a fleet with roles."""
    if split is None:
        return
    pair = f"computed at {split['prefiller']} and decoded at {split['decoder']}"
    apart, alone, tokens = split["split_ms"], split["alone_ms"], split["split_tokens"]
    if split["is_split"]:
        yield f"{pair}, with {tokens:,} tokens pulled: {apart:,.1f} ms; all at one replica: {alone:,.1f} ms"
    else:
        yield f"all at one replica: {alone:,.1f} ms; {pair}: {apart:,.1f} ms"


def _predicted(candidates: Sequence[Mapping[str, Any]]) -> list[str]:
    names = ", ".join(each["replica"] for each in candidates if each["is_predicted"])
    return [f"The overlap at {names} is predicted: no cache events say what is held there."] if names else []


def _header(*, is_sparse: bool, has_tiers: bool) -> tuple[str, ...]:
    first = _HEADER.index("REQUESTS")
    before = (*_HEADER[:first], *(("HELD TO",) if is_sparse else ()))
    if not has_tiers:
        return (*before, *_HEADER[first:])
    return (*before, *_TIERS[:3], *_HEADER[first:6], _TIERS[3], *_HEADER[6:])


def _row(candidate: Mapping[str, Any], *, is_sparse: bool, has_tiers: bool) -> tuple[str, ...]:
    """Format a row. A replica that does not report its speeds shows no tiers."""
    before = ("wait", "move") if has_tiers else ("wait",)
    seconds = (candidate[f"{name}_seconds"] for name in (*before, "prefill", "delay", "room", "cost"))
    tiers = candidate.get("tiers") or {}
    depths = (str(tiers.get(f"{tier}_tokens", "-")) for tier in ("device", "host", "disk"))
    return (
        candidate["replica"],
        str(candidate["rank"]),
        str(candidate["overlap_tokens"]),
        *((str(candidate["reached_tokens"]),) if is_sparse else ()),
        *(depths if has_tiers else ()),
        str(candidate["num_requests"]),
        str(candidate["num_pending_tokens"]),
        *(f"{1e3 * value:.1f} ms" for value in seconds),
    )


def _request(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the route and the body that the command line describes. Raises ClusterError."""
    if (arguments.prompt is None) == (arguments.file is None):
        raise ClusterError("give a prompt, or --file FILE")
    if arguments.file is not None:
        content = _read(arguments.file)
        body = {"messages": content} if isinstance(content, list) else content
        if not isinstance(body, dict) or not {"messages", "prompt"} & body.keys():
            raise ClusterError(
                f"{arguments.file} holds neither a list of messages nor a request with messages or a prompt"
            )
    elif arguments.completion:
        body = {"prompt": arguments.prompt}
    else:
        body = {"messages": [{"role": "user", "content": arguments.prompt}]}
    for name in ("model", "prompt_cache_key", "cache_salt"):
        if getattr(arguments, name) is not None:
            body[name] = getattr(arguments, name)
    return "/v1/chat/completions" if "messages" in body else "/v1/completions", body


def _read(file: str) -> Any:
    """Parse the JSON of a file, or of stdin for `-`."""
    try:
        if file == "-":
            return json.load(sys.stdin)
        with open(file, encoding="utf-8") as opened:
            return json.load(opened)
    except (OSError, ValueError) as error:
        raise ClusterError(f"cannot read {file}: {error}") from error
