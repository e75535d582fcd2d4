"""The live page's data: what a router knows of its fleet and has seen lately, as plain values.

Owns the shapes and their caps, so that neither a large fleet nor a long list makes an answer long. Knows
no HTTP; who asks may be told the same again for a while.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from replicas.protocol.events import Tier
from replicas.protocol.frames import NO_USER, LoadSnapshot, UserTag
from replicas.protocol.status import Epoch, ReplicaId, Role
from router.explain.prefix_tree import Counts, PrefixNode, Root
from router.explain.preview import because, candidates_by_cost, pair_data
from router.features.live_page.recent import NUM_SLOTS, SLOT_SECONDS, RecentDecision, Slot

MAX_REPLICAS = 256
MAX_NODES = 240
MAX_HOLDERS = 8
MAX_COMPLAINT = 300


@dataclass(frozen=True, slots=True)
class LiveReplica:
    """A replica as this router sees it. `num_on_the_way` requests were sent and are in no load yet;
    `engine` is None until it has been described, and `role` where the replica does all. `complaint` says what
    is wrong with it, if anything is."""

    replica_id: ReplicaId
    model: str
    engine: str | None
    block_size: int | None
    epoch: Epoch
    address: str
    state: str
    load: LoadSnapshot
    num_on_the_way: int
    complaint: str | None = None
    role: Role | None = None


def replicas_data(replicas: Sequence[LiveReplica], slots: Sequence[Slot]) -> list[dict[str, Any]]:
    """With what this router sent them, by slot."""
    return [_replica(replica, slots) for replica in replicas[:MAX_REPLICAS]]


def _replica(replica: LiveReplica, slots: Sequence[Slot]) -> dict[str, Any]:
    load = replica.load
    seen = [slot.replicas.get(replica.replica_id, (0, 0, 0)) for slot in slots]
    return {
        "id": replica.replica_id,
        "model": replica.model,
        "engine": replica.engine,
        "role": replica.role,
        "block_size": replica.block_size,
        "epoch": replica.epoch,
        "address": replica.address,
        "state": replica.state,
        "complaint": None if replica.complaint is None else _line(replica.complaint),
        "running": load.num_running,
        "waiting": load.num_waiting,
        "on_the_way": replica.num_on_the_way,
        "pending_tokens": load.num_pending_tokens,
        "used_blocks": load.num_used_blocks,
        "cached_blocks": load.num_cached_blocks,
        "is_predicted": load.is_predicted,
        "total_blocks": load.num_total_blocks,
        "tiers": _tiers(load),
        "requests": [num_prompts for num_prompts, _, _ in seen],
        "tokens": sum(num_tokens for _, num_tokens, _ in seen),
        "cached_tokens": sum(num_cached for _, _, num_cached in seen),
    }


def _tiers(load: LoadSnapshot) -> list[dict[str, Any]]:
    """Format the tiers below the device, if any."""
    tiers = (
        (Tier.HOST, load.num_host_bytes, load.max_host_bytes),
        (Tier.DISK, load.num_disk_bytes, load.max_disk_bytes),
    )
    return [{"tier": tier.value, "bytes": used, "max_bytes": most} for tier, used, most in tiers if most]


def _line(text: str) -> str:
    whole = " ".join(text.split())
    return whole if len(whole) <= MAX_COMPLAINT else whole[: MAX_COMPLAINT - 1] + "…"


def slots_data(start: int, slots: Sequence[Slot]) -> dict[str, Any]:
    """Columns, oldest first; the last slot is not over yet."""
    return {
        "start": start,
        "seconds": SLOT_SECONDS,
        "most": NUM_SLOTS,
        "requests": [slot.num_requests for slot in slots],
        "errors": [slot.num_errors for slot in slots],
        "computed": [slot.num_computed for slot in slots],
        "own": [slot.num_own for slot in slots],
        "cross_user": [slot.num_cross_user for slot in slots],
        "unattributed": [slot.num_unattributed for slot in slots],
        "ttft_p50": [_milliseconds(slot.percentile(0.5)) for slot in slots],
        "ttft_p90": [_milliseconds(slot.percentile(0.9)) for slot in slots],
    }


def node_data(node: PrefixNode) -> dict[str, Any]:
    """All but who holds it."""
    counts = node.counts
    parent = node.parent
    return {
        "id": node.number,
        "parent": None if isinstance(parent, Root) else parent.number,
        "place": _place(node.root),
        "start": node.start * node.block_size,
        "end": node.end * node.block_size,
        "hash": node.hashes[-4:].hex(),
        "requests": counts.num_requests,
        "unreported": counts.num_unreported,
        "hits": counts.num_hits,
        "own_hits": counts.num_own_hits,
        "cross_user_hits": counts.num_cross_user_hits,
        "users": _users(counts),
        "requests_of_other_users": counts.num_requests_of_others,
        "requests_without_user": counts.num_requests_without_user,
        "key": counts.key,
        "several_keys": counts.num_keys > 1,
        "first": counts.first_ended_at,
        "last": counts.last.ended_at if counts.last else None,
        "children": len(node.children),
    }


def user_name(user: UserTag) -> str | None:
    """Return a short tag: enough to tell users apart on a page."""
    return None if user == NO_USER else user.hex()[:6]


def _place(root: Root) -> dict[str, Any]:
    namespace = root.namespace
    return {
        # Not the root itself: it is a key.
        "root": hashlib.blake2b(root.block_hash, digest_size=4).hexdigest(),
        "model": namespace.model,
        "adapter": namespace.adapter,
        "tenant": namespace.tenant,
    }


def _users(counts: Counts) -> list[tuple[str | None, int]]:
    by_requests = sorted(counts.users.items(), key=lambda item: -item[1])
    return [(user_name(user), num_requests) for user, num_requests in by_requests]


def add_holders(row: dict[str, Any], depths: dict[int, dict[ReplicaId, int]]) -> None:
    """To one row after the other, the deepest first. `depths` has the leading tokens that replicas hold, by
    node, to begin with for the `frontier`: who holds a prefix holds all that it begins with."""
    start, end, parent = row["start"], row["end"], row["parent"]
    held = depths.pop(row["id"], {})
    deepest = sorted((-min(depth, end), replica_id) for replica_id, depth in held.items() if depth > start)
    row["holders"] = [(replica_id, -depth) for depth, replica_id in deepest[:MAX_HOLDERS]]
    row["num_holders"] = len(deepest)
    if parent is None:
        return
    above = depths.setdefault(parent, {})
    for replica_id, depth in held.items():
        if depth > above.get(replica_id, 0):
            above[replica_id] = depth


def frontier(rows: Iterable[PrefixNode]) -> list[PrefixNode]:
    """Return the nodes without a child among them."""
    nodes = list(rows)
    parents = {node.parent.number for node in nodes if isinstance(node.parent, PrefixNode)}
    return [node for node in nodes if node.number not in parents]


def decision_data(recent: RecentDecision) -> dict[str, Any]:
    """Return a line of the list."""
    decision, usage = recent.decision, recent.usage
    return {
        "number": recent.number,
        "at": recent.arrived_at + recent.ended_seconds,
        "model": recent.model,
        "user": user_name(recent.user),
        "replica": None if decision is None else decision.replica_id,
        "computed_at": None if decision is None else decision.computed_at,
        "reason": None if decision is None else decision.reason.value,
        "prompt_tokens": recent.num_prompt_tokens,
        "expected_tokens": None if decision is None else decision.num_found_tokens,
        "cached_tokens": None if usage is None else usage.num_cached_tokens,
        "cross_user_tokens": None if usage is None else usage.num_cross_user_tokens,
        "own_tokens": None if usage is None else usage.num_own_tokens,
        "host_tokens": None if usage is None else usage.num_host_tokens,
        "disk_tokens": None if usage is None else usage.num_disk_tokens,
        "images": recent.num_images,
        "image_tokens": recent.num_image_tokens,
        "cached_image_tokens": recent.num_cached_image_tokens,
        "difference": recent.difference,
        "ttft_ms": _milliseconds(recent.first_token_seconds),
        "status": recent.status,
        "error": recent.error,
        "finding": None if recent.misses is None else recent.misses.cause.value,
        "block_size": recent.block_size,
    }


def explained_data(recent: RecentDecision) -> dict[str, Any]:
    """All of a decision."""
    decision = recent.decision
    return {
        **decision_data(recent),
        "request_id": recent.request_id,
        "route": recent.route,
        "adapter": recent.adapter,
        "tenant": recent.tenant,
        "key": recent.key,
        "arrived_at": recent.arrived_at,
        "ended_ms": _milliseconds(recent.ended_seconds),
        "output_tokens": recent.num_output_tokens,
        "rank": None if decision is None else decision.rank,
        "because": None if decision is None else because(decision),
        "candidates": [] if decision is None else candidates_by_cost(decision, recent.block_size),
        "split": None if decision is None else pair_data(decision),
        "findings": [{"kind": one.cause.value, "text": one.text} for one in recent.findings()],
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 1)
