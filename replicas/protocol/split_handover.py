"""SplitHandover: what the server of a split's first part says to the server of the second, on its way there.

Pure. Owns how long it may be used, for routers and replicas. The first server keeps the KV for a lease, which
begins when it has computed the prompt; after that other prompts are written there, and who reads it then gets
their KV. So it is used within half of the lease, and its age is never taken for less than it is: the router
counts all the time since it sent the first part but what that replica took, and the clocks of both hosts must
agree as well.
"""

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from replicas.protocol.frames import MAX_HANDOVER_BYTES, Submit

PROMPT_BYTES = 16
USABLE_SHARE = 0.5
"""Share of a lease."""

_Seconds = Annotated[float, Meta(ge=0.0)]


class SplitHandover(Struct, frozen=True, array_like=True):
    """`params` are the server's own, as JSON, of the prompt that `prompt` names. They came `took_seconds`
    after the submit of the first part, at `came_at` of that host's wall clock. They were `age_seconds` old
    when the router sent them on."""

    params: bytes
    prompt: Annotated[bytes, Meta(min_length=PROMPT_BYTES, max_length=PROMPT_BYTES)]
    lease_seconds: _Seconds
    took_seconds: _Seconds
    came_at: float
    age_seconds: _Seconds = 0.0

    def is_usable(self, more_seconds: float, wall_time: float) -> bool:
        """Whether it may be used `more_seconds` after it was sent on. False where a figure is no number."""
        most = USABLE_SHARE * self.lease_seconds
        return self.age_seconds + more_seconds <= most and wall_time - self.came_at <= most

    def packed(self) -> bytes:
        """Empty if it is too long."""
        packed = _encode(self)
        return packed if len(packed) <= MAX_HANDOVER_BYTES else b""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(SplitHandover)


def read_handover(packed: bytes) -> SplitHandover | None:
    """None if it is none."""
    try:
        return _decoder.decode(packed)
    except msgspec.MsgspecError:
        return None


def sent_on(packed: bytes, elapsed_seconds: float, wall_time: float) -> bytes:
    """Return what goes with the second part, `elapsed_seconds` after the first was sent; empty if it is too
    old, or none. For a single submit: a second one would read KV that was given back with the first."""
    found = read_handover(packed)
    if found is None:
        return b""
    age = max(elapsed_seconds - found.took_seconds, 0.0)  # in this order what is no number stays none
    aged = msgspec.structs.replace(found, age_seconds=age)
    return aged.packed() if aged.is_usable(0.0, wall_time) else b""


def prompt_named(submit: Submit) -> bytes:
    """Name a prompt, with its namespace: KV of one is never taken for another's."""
    named = hashlib.blake2b(submit.root, digest_size=PROMPT_BYTES, person=b"kvasir-split-v1")
    named.update(submit.packed_tokens)
    return named.digest()
