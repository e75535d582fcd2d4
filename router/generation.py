"""Generation: all that dispatch needs of a request.

Plain data.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import SamplingParams, Submit
from replicas.protocol.status import Adapter
from router.caller import DEFAULT_TENANT, OPEN_CALLER, Caller
from router.programs.name import ProgramName
from router.prompt.images import Media


@dataclass(frozen=True, slots=True)
class Generation:
    """A request to a replica. `submit` is complete except for what each attempt sets once a replica is
    chosen. `token_ids` are its packed tokens, `block_hashes` the prompt's full blocks under its root.
    `tenant` is a label for metrics, `caller` the requester, and `salt_tag` a digest of the client's salt, if
    any."""

    model: str
    token_ids: Sequence[int]
    submit: Submit
    block_hashes: Sequence[BlockHash]
    bucket: bytes
    head_bucket: bytes | None = None
    """The bucket of its system prompt and tools, if these are too short for the index."""
    adapter: Adapter | None = None
    tenant: str = DEFAULT_TENANT
    caller: Caller = OPEN_CALLER
    prompt_cache_key: str | None = None
    timeout_seconds: float | None = None
    """From its arrival to its first token; later the client does not want it."""
    salt_tag: bytes = b""
    media: Sequence[Media] = ()
    """Contents for the spans of `submit.media`, in order; the replica must have them first."""
    grammar_seconds: float = 0.0
    """Processor time of compiling its grammar, charged to its tenant."""
    num_relayed_choices: int = 0
    """Choices of an answer that a server writes itself, and that comes as one."""
    program: ProgramName | None = None
    """The program that it is a turn of."""
    is_awaited: bool = True
    """Whether a client waits for its first token: the time that its tenant is promised is for these."""

    def of_program(self, name: ProgramName) -> "Generation":
        return replace(self, program=name)

    def with_image_ids(self) -> bytes:
        """Return the packed tokens, those of an image as numbers of its own: the same for the same image
        alone."""
        packed = bytearray(self.submit.packed_tokens)
        for span in self.submit.media:
            size = 4 * span.length
            name = span.content_hash * (size // len(span.content_hash) + 1)
            packed[4 * span.start : 4 * span.start + size] = name[:size]
        return bytes(packed)

    def token_ids_with_images(self) -> Sequence[int]:
        """Return the same as numbers."""
        return array("I", self.with_image_ids()) if self.media else self.token_ids

    def image_path(self, position: int) -> str | None:
        """Return the path in the client's body of the image at the token `position`, if there is one."""
        for span, media in zip(self.submit.media, self.media, strict=True):
            if span.start <= position < span.start + span.length:
                return media.path
        return None

    @property
    def sampling(self) -> SamplingParams:
        return self.submit.sampling

    @property
    def num_choices(self) -> int:
        return self.submit.num_choices

    @property
    def num_sequences(self) -> int:
        """Choices that are computed for it, wherever."""
        return self.num_relayed_choices or self.submit.num_choices
