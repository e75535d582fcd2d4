"""Workloads: what arrives when, with which prefix shared with whom. Pure and seeded.

A workload is a value. It comes from a recorded trace or a generator, and is replayed against a running
cluster or a simulated fleet; nothing here knows which.
"""

from collections.abc import Callable

from loadtests.workloads.chats import agent, chat, cross_user, mixed, no_reuse, rag
from loadtests.workloads.documents import documents
from loadtests.workloads.generators import (
    agentic,
    b2b,
    coding_agents,
    key_per_request,
    multi_turn,
    one_key,
    one_large_tenant,
    same_head,
    shared_prefix,
    short_prompts,
    zipf_b2b,
)
from loadtests.workloads.ideal import IdealHits, Loss, ideal_hits, ideal_hits_by_request
from loadtests.workloads.tenants import with_tenants
from loadtests.workloads.traces import read_trace
from loadtests.workloads.workload import (
    ImageSpan,
    Message,
    PageSize,
    TraceRequest,
    Workload,
    first_requests,
    first_seconds,
    scale,
    shrink,
    with_block_tokens,
    without_keys,
    without_longer_than,
)

GENERATORS: dict[str, Callable[..., Workload]] = {
    "b2b": b2b,
    "zipf-b2b": zipf_b2b,
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "agentic": agentic,
    "coding-agents": coding_agents,
    "same-head": same_head,
    "one-large-tenant": one_large_tenant,
    "one-key": one_key,
    "key-per-request": key_per_request,
    "short-prompts": short_prompts,
    "cross-user": cross_user,
    "chat": chat,
    "agent": agent,
    "rag": rag,
    "no-reuse": no_reuse,
    "mixed": mixed,
    "documents": documents,
}
"""Every generator by the name that a command line uses."""

SENDS_IMAGES = frozenset({"documents"})
"""Workloads whose prompts have images, which text models reject."""

__all__ = [
    "GENERATORS",
    "SENDS_IMAGES",
    "IdealHits",
    "ImageSpan",
    "Loss",
    "Message",
    "PageSize",
    "TraceRequest",
    "Workload",
    "agent",
    "agentic",
    "b2b",
    "chat",
    "coding_agents",
    "cross_user",
    "documents",
    "first_requests",
    "first_seconds",
    "ideal_hits",
    "ideal_hits_by_request",
    "key_per_request",
    "mixed",
    "multi_turn",
    "no_reuse",
    "one_key",
    "one_large_tenant",
    "rag",
    "read_trace",
    "same_head",
    "scale",
    "short_prompts",
    "shrink",
    "with_block_tokens",
    "with_tenants",
    "without_keys",
    "without_longer_than",
    "zipf_b2b",
]
