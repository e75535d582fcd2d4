"""Live: what this router has seen lately, for the page at `/`.

Owns the sightings, the last decisions and the counts of the last minutes, and what is taken of a request
for them: hashes and numbers, never tokens or text.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence

from replicas.protocol.frames import NO_USER, PromptUsage, UserTag
from router.observation.recent import Origins, Recent, RecentDecision, Slot
from router.observation.served import CLIENT_GONE, ServedPrompt, ServedRequest
from router.observation.sightings import Known, NamespaceName, Sighting, Sightings

KEY_CHARACTERS = 24
"""How much of a prompt_cache_key is kept."""

BEGINNING_TOKENS = 128
"""Prompts with this many first tokens in common begin alike, whatever namespace they are in."""


class Live:
    """`observe` is called with every request; `block_size_of` is for a model that has been served."""

    def __init__(self, block_size_of: Callable[[str], int]) -> None:
        self._block_size_of = block_size_of
        self.sightings = Sightings()
        self.recent = Recent()

    def observe(self, served: ServedRequest) -> None:
        slot = self.recent.slot(served.arrived_at + served.ended_seconds)
        slot.num_requests += 1
        # A client that leaves is no error of ours; whatever else is not answered well is one.
        slot.num_errors += served.error is not None and served.status != CLIENT_GONE
        if served.first_token_seconds is not None:
            slot.ttft.add(served.first_token_seconds)
        for prompt in served.prompts:
            self._observe_prompt(served, prompt, slot)

    def _observe_prompt(self, served: ServedRequest, prompt: ServedPrompt, slot: Slot) -> None:
        generation, usage, decision = prompt.generation, prompt.usage, prompt.decision
        block_size = self._block_size_of(generation.model)
        known = None
        if usage is not None and decision is not None:
            origins = origins_of(usage)
            known = self._see(served, prompt, usage, block_size)
            num_prompts, before = slot.replicas.get(decision.replica_id, (0, Origins()))
            slot.replicas[decision.replica_id] = (num_prompts + 1, before + origins)
            slot.origins += origins
        self.recent.add(
            RecentDecision(
                number=self.recent.next_number(),
                request_id=served.request_id,
                route=served.route,
                model=served.model,
                adapter=None if generation.adapter is None else generation.adapter.name,
                tenant=generation.tenant,
                user=generation.submit.user,
                key=short_key(generation.prompt_cache_key),
                status=served.status,
                error=served.error,
                arrived_at=served.arrived_at,
                first_token_seconds=served.first_token_seconds,
                ended_seconds=served.ended_seconds,
                num_output_tokens=prompt.num_output_tokens,
                num_prompt_tokens=len(generation.token_ids),
                usage=usage,
                decision=decision,
                known=known,
                block_size=block_size,
            )
        )

    def _see(self, served: ServedRequest, prompt: ServedPrompt, usage: PromptUsage, block_size: int) -> Known:
        generation, decision = prompt.generation, prompt.decision
        assert decision is not None
        adapter = generation.adapter
        return self.sightings.see(
            Sighting(
                root=generation.submit.root,
                namespace=NamespaceName(
                    generation.model, None if adapter is None else adapter.name, generation.tenant
                ),
                block_hashes=generation.block_hashes,
                block_size=block_size,
                user=generation.submit.user,
                key=short_key(generation.prompt_cache_key),
                replica_id=decision.replica_id,
                num_cached_tokens=usage.num_cached_tokens,
                num_cross_user_tokens=usage.num_cross_user_tokens,
                num_own_tokens=usage.num_own_tokens,
                decided_at=served.arrived_at + (served.prepared_seconds or 0.0),
                ended_at=served.arrived_at + served.ended_seconds,
                beginning=beginning_of(generation.token_ids),
            )
        )


def origins_of(usage: PromptUsage) -> Origins:
    num_attributed = usage.num_own_tokens + usage.num_cross_user_tokens
    return Origins(
        num_computed=usage.num_prompt_tokens - usage.num_cached_tokens,
        num_own=usage.num_own_tokens,
        num_cross_user=usage.num_cross_user_tokens,
        num_unattributed=usage.num_cached_tokens - num_attributed,
    )


def user_name(user: UserTag) -> str | None:
    """A short tag: enough to tell users apart on a page."""
    return None if user == NO_USER else user.hex()[:6]


def short_key(key: str | None) -> str | None:
    if key is None or len(key) <= KEY_CHARACTERS:
        return key
    return key[: KEY_CHARACTERS - 1] + "…"


def beginning_of(token_ids: Sequence[int]) -> bytes | None:
    if len(token_ids) < BEGINNING_TOKENS:
        return None
    first = array("I", token_ids[:BEGINNING_TOKENS])
    return hashlib.blake2b(first.tobytes(), digest_size=8).digest()
