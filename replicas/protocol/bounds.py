"""Bounds: what a number or a name may be that another process says.

Owns the limits and the checks. Every check returns what it was given, or raises ValueError with a sentence
that may be logged. Knows neither Redis nor the wire. The limits are far beyond what any replica says of
itself; they keep one wrong number from spoiling a sum, a median or a scrape.
"""

import re

from replicas.protocol.frames import LoadSnapshot, PromptUsage
from replicas.protocol.status import ModelCard

MAX_REQUESTS = 1 << 20
MAX_TOKENS = 1 << 40
MAX_BLOCKS = 1 << 32
MAX_SECONDS = 3600.0
MAX_NUMBER = (1 << 63) - 1
"""Of changes, heartbeats and registrations: what Redis can count to."""

MAX_ID_CHARACTERS = 253
MAX_NAME_CHARACTERS = 512
MAX_MESSAGE_CHARACTERS = 2000
MAX_SHOWN_CHARACTERS = 320

_ID = re.compile(r"[A-Za-z0-9._-]+")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_DIGITS = re.compile(rb"[0-9]{1,19}")


def checked_id(text: str) -> str:
    """A replica's id or epoch: letters, digits, '.', '_' and '-'."""
    if len(text) > MAX_ID_CHARACTERS or not _ID.fullmatch(text):
        raise ValueError(f"{shown(text)} is no id: letters, digits, '.', '_' and '-'")
    return text


def checked_name(text: str) -> str:
    """A name that people give: of a model, an adapter, an engine. Nothing that would garble a log."""
    if not 0 < len(text) <= MAX_NAME_CHARACTERS or not text.isprintable():
        raise ValueError(f"{shown(text)} is no name")
    return text


def checked_address(text: str) -> str:
    """host:port, and no other kind of address that gRPC would know."""
    match = _ADDRESS.fullmatch(text)
    if len(text) > MAX_NAME_CHARACTERS or match is None or not 0 < int(match[1]) < 2**16:
        raise ValueError(f"{shown(text)} is no address of the form host:port")
    return text


def checked_count(value: int, most: int, what: str) -> int:
    if not 0 <= value <= most:
        raise ValueError(f"{what} is {shown(value)}, not between 0 and {most}")
    return value


def parsed_number(text: bytes) -> int:
    """Decimal digits and nothing else."""
    if not _DIGITS.fullmatch(text):
        raise ValueError(f"{shown(text)} is no number")
    return checked_count(int(text), MAX_NUMBER, "a number")


def checked_load(load: LoadSnapshot) -> LoadSnapshot:
    # One expression: it is evaluated for each frame of each replica.
    if not (
        0 <= load.num_running <= MAX_REQUESTS
        and 0 <= load.num_waiting <= MAX_REQUESTS
        and 0 <= load.num_pending_tokens <= MAX_TOKENS
        and 0 <= load.num_context_tokens <= MAX_TOKENS
        and 0 <= load.num_used_blocks <= MAX_BLOCKS
        and 0 <= load.num_cached_blocks <= MAX_BLOCKS
        and 0 <= load.num_total_blocks <= MAX_BLOCKS
        and 0.0 <= load.prefill_seconds_per_token <= MAX_SECONDS
        and 0.0 <= load.decode_step_seconds <= MAX_SECONDS
    ):
        raise ValueError(f"a load is out of bounds: {shown(load)}")
    return load


def checked_usage(usage: PromptUsage) -> PromptUsage:
    """Parts are no larger than the whole."""
    cached = usage.num_cached_tokens
    if not (
        cached <= usage.num_prompt_tokens
        and usage.num_cross_user_tokens + usage.num_own_tokens <= cached
        and usage.num_slower_tier_tokens <= cached
    ):
        raise ValueError(f"a usage does not add up: {shown(usage)}")
    return usage


def checked_logprob(value: float) -> float:
    """Minus infinity is one: that of a token that was not allowed. Rounding may lift one a little above 0."""
    if not value <= 1.0:
        raise ValueError(f"a log probability is {value}")
    return value


def checked_card(card: ModelCard) -> ModelCard:
    checked_name(card.name)
    checked_name(card.fingerprint)
    checked_name(card.engine)
    for what, value, most in (
        ("a block size", card.block_size, 1 << 16),
        ("a context length", card.context_length, MAX_TOKENS),
        ("a vocabulary's size", card.vocab_size, MAX_TOKENS),
    ):
        checked_count(value - 1, most, f"{what} less one")
    if len(card.eos_token_ids) > MAX_NAME_CHARACTERS or len(card.adapters) > MAX_REQUESTS:
        raise ValueError(f"a model card is too long: {shown(card)}")
    for adapter in card.adapters:
        checked_name(adapter.name)
        checked_name(adapter.fingerprint)
    return card


def shown(value: object) -> str:
    """For a message: what others wrote, short and on one line."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"
