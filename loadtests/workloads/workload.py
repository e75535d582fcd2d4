"""Types of a workload, and how one is made smaller or faster."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PageSize:
    """In pixels."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Message:
    """A piece of a chat. Neighbours of one role are one message.

    `content` is a name that stands for a text: equal names are equal texts, also in different tenants, and a
    shorter one is the beginning of a longer one. With a `page` it stands for a picture of that size instead,
    and equal names are equal files.
    """

    role: str
    content: str
    num_tokens: int
    page: PageSize | None = None


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Tokens `[start, start + num_tokens)` of a prompt stand for this image; `content` is its name."""

    content: str
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a workload.

    `prefix_ids` has one id per block of `Workload.block_tokens` tokens; the last block may be partial. Equal
    ids stand for equal prompts from their beginning to the end of that block, so a partial block's id is
    never that of a longer one.

    Requests of two tenants share no ids, even if their texts are the same. `messages` are empty where only
    prefixes are known; templates add tokens of their own to them, which `num_input_tokens` leaves out.
    `images` are in the order of the prompt, and the ids stand for them as well.
    """

    arrival_seconds: float
    num_input_tokens: int
    num_output_tokens: int
    prefix_ids: tuple[int, ...]
    user: str
    session: str
    prompt_cache_key: str | None = None
    tenant: str | None = None
    messages: tuple[Message, ...] = ()
    images: tuple[ImageSpan, ...] = ()

    @property
    def num_image_tokens(self) -> int:
        return sum(image.num_tokens for image in self.images)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by arrival."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    @property
    def num_input_tokens(self) -> int:
        return sum(request.num_input_tokens for request in self.requests)

    @property
    def has_images(self) -> bool:
        return any(request.images for request in self.requests)

    @property
    def duration_seconds(self) -> float:
        """From time zero to the last arrival."""
        return self.requests[-1].arrival_seconds if self.requests else 0.0


def by_arrival(requests: Sequence[TraceRequest]) -> tuple[TraceRequest, ...]:
    return tuple(sorted(requests, key=lambda request: request.arrival_seconds))


def scale(workload: Workload, speed: float) -> Workload:
    """Return the same requests, arriving `speed` times as fast."""
    if speed <= 0:
        raise ValueError(f"a speed is above 0, not {speed:g}")
    return _with_requests(
        workload,
        [replace(request, arrival_seconds=request.arrival_seconds / speed) for request in workload.requests],
    )


def first_requests(workload: Workload, count: int) -> Workload:
    return _with_requests(workload, workload.requests[:count])


def first_seconds(workload: Workload, seconds: float) -> Workload:
    """Return the requests of the first `seconds`."""
    return _with_requests(
        workload, [request for request in workload.requests if request.arrival_seconds < seconds]
    )


def with_block_tokens(workload: Workload, block_tokens: int) -> Workload:
    """Return the same prompts in blocks of another size, which divides the old one or is a multiple of it.

    Raises ValueError.
    """
    old, new = workload.block_tokens, block_tokens
    if old % new and new % old:
        raise ValueError(f"blocks of {old} tokens neither divide into blocks of {new} nor add up to them")
    if any(request.images for request in workload.requests):
        raise ValueError("prompts with images keep their blocks")

    def ids(request: TraceRequest) -> tuple[int, ...]:
        num_blocks = -(-request.num_input_tokens // new)
        if new >= old:
            whole = request.prefix_ids[new // old - 1 :: new // old]
            return (*whole, *request.prefix_ids[-1:][: num_blocks - len(whole)])
        parts = old // new
        return tuple(each * parts + part for each in request.prefix_ids for part in range(parts))[:num_blocks]

    requests = [replace(request, prefix_ids=ids(request)) for request in workload.requests]
    return Workload(workload.name, new, tuple(requests))


def without_keys(workload: Workload) -> Workload:
    """Return the same requests without any `prompt_cache_key`."""
    return _with_requests(
        workload, [replace(request, prompt_cache_key=None) for request in workload.requests]
    )


def without_longer_than(workload: Workload, num_tokens: int) -> Workload:
    """Without the requests whose prompt and answer together are longer than that."""
    return _with_requests(
        workload,
        [
            request
            for request in workload.requests
            if request.num_input_tokens + request.num_output_tokens <= num_tokens
        ],
    )


def shrink(workload: Workload, factor: float) -> Workload:
    """Prompts, answers and blocks of `factor` times as many tokens, for models with a small context.

    Who shares which block with whom stays as it is, and so does the pace. Raises ValueError for a workload
    with images.
    """
    if not 0 < factor <= 1:
        raise ValueError(f"tokens are scaled by a factor above 0 and up to 1, not {factor:g}")
    if factor != 1 and workload.has_images:
        raise ValueError(
            "prompts with images cannot be scaled: an image has as many tokens as its size makes"
        )
    block_tokens = max(1, round(workload.block_tokens * factor))

    def shrunk(request: TraceRequest) -> TraceRequest:
        num_before_last = len(request.prefix_ids) - 1
        num_in_last = request.num_input_tokens - num_before_last * workload.block_tokens
        num_in_last = min(block_tokens, max(1, round(num_in_last * factor)))
        return replace(
            request,
            num_input_tokens=num_before_last * block_tokens + num_in_last,
            num_output_tokens=max(1, round(request.num_output_tokens * factor)),
            messages=tuple(
                replace(message, num_tokens=max(1, round(message.num_tokens * factor)))
                for message in request.messages
            ),
        )

    requests = [shrunk(request) for request in workload.requests]
    return Workload(workload.name, block_tokens, tuple(requests))


def _with_requests(workload: Workload, requests: Sequence[TraceRequest]) -> Workload:
    return replace(workload, requests=tuple(requests))
