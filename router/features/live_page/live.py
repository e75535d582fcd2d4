"""Live: what this router has seen lately, for the page at `/`.

Owns the last decisions and the counts of the last minutes, and what is taken of a request for them: numbers,
never tokens or text.
"""

from collections.abc import Callable, Sequence

from replicas.protocol.blocks import ImageTokens
from replicas.protocol.frames import NO_USER, PromptUsage, UserTag
from router.explain.prefix_tree import short_key
from router.features.live_page.recent import Origins, Recent, RecentDecision, Slot
from router.served import CLIENT_GONE, ServedPrompt, ServedRequest


class Live:
    """`observe` is called with every request; `block_size_of` is for a model that has been served."""

    def __init__(self, block_size_of: Callable[[str], int]) -> None:
        self._block_size_of = block_size_of
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
        if usage is not None and decision is not None:
            origins = origins_of(usage)
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
                misses=prompt.misses,
                block_size=block_size,
                num_images=len(generation.submit.media),
                num_image_tokens=sum(span.length for span in generation.submit.media),
                num_cached_image_tokens=_num_cached(generation.submit.media, usage),
                difference=prompt.difference,
            )
        )


def origins_of(usage: PromptUsage) -> Origins:
    """Return no tokens if it is not known where they came from."""
    if usage.num_cached_tokens is None:
        return Origins()
    num_attributed = usage.num_own_tokens + usage.num_cross_user_tokens
    return Origins(
        num_computed=usage.num_prompt_tokens - usage.num_cached_tokens,
        num_own=usage.num_own_tokens,
        num_cross_user=usage.num_cross_user_tokens,
        num_unattributed=usage.num_cached_tokens - num_attributed,
    )


def _num_cached(images: Sequence[ImageTokens], usage: PromptUsage | None) -> int:
    """Count the cached tokens of images."""
    num_cached = 0 if usage is None else usage.num_cached_tokens or 0
    return sum(min(span.length, max(0, num_cached - span.start)) for span in images)


def user_name(user: UserTag) -> str | None:
    """A short tag: enough to tell users apart on a page."""
    return None if user == NO_USER else user.hex()[:6]
