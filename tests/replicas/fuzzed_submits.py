"""Submits with anything in any field, as the wire carries it; seeded."""

import random
from collections.abc import Callable
from typing import Any

from replicas.protocol.blocks import HASH_BYTES, pack_token_ids
from replicas.protocol.status import ModelCard
from replicas.protocol.wire import encode

U32, U64, I32 = 2**32 - 1, 2**64 - 1, 2**31 - 1
FLOATS = (
    float("nan"),
    float("inf"),
    float("-inf"),
    -1.0,
    -0.0,
    0.0,
    5e-324,
    1e-9,
    0.5,
    1.0,
    2.0,
    1e30,
    1e308,
)
COUNTS = (0, 1, 2, 3, 64, I32, I32 + 1, U32 - 1, U32)

TOO_LONG = {"max_tokens": 1, "grammar": "x" * (2**20 + 1)}

Plain = dict[str, Any]
"""A submit by the names of its fields."""

Change = Callable[[random.Random, Plain, ModelCard], None]


def fuzzed_submit(rng: random.Random, submit_id: int, card: ModelCard) -> Plain:
    """A sound request, of which one to four things are not, or may not be."""
    prompt = [rng.randrange(card.vocab_size) for _ in range(rng.randint(1, 60))]
    submit: Plain = {
        "submit_id": submit_id,
        "packed_tokens": pack_token_ids(prompt),
        "sampling": {"max_tokens": rng.randint(1, 8), "seed": 7},
        "root": rng.randbytes(HASH_BYTES),
        "num_choices": 1,
    }
    for at in sorted(rng.sample(range(len(CHANGES)), rng.randint(1, 4))):
        CHANGES[at](rng, submit, card)
    return submit


def broken_submit(rng: random.Random) -> Plain:
    """One that breaks the contract of the wire, which no router does."""
    sound = {"submit_id": 1, "packed_tokens": bytes(8), "sampling": {"max_tokens": 1}, "root": bytes(16)}
    broken = {
        "submit_id": rng.choice((-1, 1.5, None, "1")),
        "packed_tokens": rng.choice((rng.randbytes(4 * rng.randint(0, 9) + rng.randint(1, 3)), [1, 2], "12")),
        "sampling": rng.choice(
            ({}, [], {"max_tokens": -1}, {"max_tokens": 1, "seed": -1}, {"max_tokens": 1.5}, TOO_LONG)
        ),
        "root": rng.choice((rng.randbytes(rng.choice((0, 1, 15, 17, 1000))), "x" * 16, 16)),
        "num_choices": rng.choice((0, 2**32, True, "1")),
        "user": rng.randbytes(rng.randint(17, 90)),
        "priority": rng.choice((2**31, -(2**31) - 1)),
        "announced_hashes": rng.choice(
            ([rng.randbytes(15)], [rng.randbytes(17)], [rng.randbytes(16)] * 3, rng.randbytes(16))
        ),
        "media": [{"content_hash": b"", "start": -1, "length": 1}],
        "num_output_tokens": rng.choice((-1, 2**32)),
        "adapter": rng.choice((1, b"bytes")),
    }
    name = rng.choice(sorted(broken))
    return sound | {name: broken[name]}


def _token_ids(rng: random.Random, submit: Plain, card: ModelCard) -> None:
    vocabulary, context = card.vocab_size, card.context_length
    submit["packed_tokens"] = pack_token_ids(
        rng.choice(
            (
                [],
                [vocabulary],
                [5, U32],
                [vocabulary - 1] * 17,
                [rng.randrange(2**32) for _ in range(20)],
                [7] * (context - 1),
                [7] * context,
                [7] * (context + 1),
                [7] * 100_000,
            )
        )
    )


def _sampling(rng: random.Random, submit: Plain, card: ModelCard) -> None:
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    for name in rng.sample(names, rng.randint(1, 3)):
        submit["sampling"][name] = rng.choice(FLOATS)


def _limits(rng: random.Random, submit: Plain, card: ModelCard) -> None:
    name = rng.choice(("max_tokens", "min_tokens", "top_k", "num_logprobs"))
    submit["sampling"][name] = rng.choice(COUNTS)


def _seed(rng: random.Random, submit: Plain, card: ModelCard) -> None:
    submit["sampling"]["seed"] = rng.choice((0, 2**63 - 1, 2**63, U64))
    submit["sampling"]["temperature"] = 1.0


def _biases(rng: random.Random, submit: Plain, card: ModelCard) -> None:
    for _ in range(rng.choice((1, 3, 2000))):
        token = rng.choice((0, 5, card.vocab_size - 1, card.vocab_size, U32))
        submit["sampling"].setdefault("logit_bias", []).append((token, rng.choice(FLOATS)))


def _stops(rng: random.Random, submit: Plain, card: ModelCard) -> None:
    submit["sampling"]["stop_token_ids"] = rng.choices((0, 5, card.vocab_size, U32), k=rng.choice((1, 500)))
    submit["sampling"]["ignore_eos"] = rng.random() < 0.5


def _choices(rng: random.Random, submit: Plain, card: ModelCard) -> None:
    submit["num_choices"] = rng.choice((2, 3, 20, 129, I32, U32))


def _outputs(rng: random.Random, submit: Plain, card: ModelCard) -> None:
    num_tokens = len(submit["packed_tokens"]) // 4
    submit["num_output_tokens"] = rng.choice((1, max(0, num_tokens - 1), num_tokens, num_tokens + 1, U32))


def _names(rng: random.Random, submit: Plain, card: ModelCard) -> None:
    if rng.random() < 0.5:
        submit["adapter"] = rng.choice(("", "nobody", "\0", "../../etc", "x" * 10_000))
    submit["user"] = rng.randbytes(rng.randint(0, 16))
    submit["request_id"] = rng.choice(("", "a\nb", "%s %d {}", "x" * 10_000))
    submit["trace_parent"] = rng.choice(
        ("", "00-zz-zz-01", "x" * 1000, "00-" + "0" * 32 + "-" + "0" * 16 + "-01")
    )
    submit["trace_state"] = rng.choice(("", "=,=,", "x" * 10_000))


def _order(rng: random.Random, submit: Plain, card: ModelCard) -> None:
    submit["priority"] = rng.choice((-I32 - 1, -1, 1, I32))
    submit["num_expected_tokens"] = rng.choice(COUNTS)


def _announced(rng: random.Random, submit: Plain, card: ModelCard) -> None:
    num_hashes = rng.randint(0, len(submit["packed_tokens"]) // 4)
    submit["announced_hashes"] = [rng.randbytes(HASH_BYTES) for _ in range(num_hashes)]
    submit["announcement_id"] = rng.choice((0, 1, 1, U64))


def _media(rng: random.Random, submit: Plain, card: ModelCard) -> None:
    for _ in range(rng.randint(1, 3)):
        content_hash = rng.randbytes(rng.choice((0, 16, 1000)))
        span = {"content_hash": content_hash, "start": rng.choice(COUNTS), "length": rng.choice(COUNTS)}
        submit.setdefault("media", []).append(span)


def _grammar(rng: random.Random, submit: Plain, card: ModelCard) -> None:
    submit["sampling"]["grammar"] = rng.choice(
        (
            'start: "a"',
            "start: /[a-z ]+/",
            'start: %json {"type": "array", "minItems": 3}',
            "start: /(.*a.{20}b|.*c.{18}d)/",
            "start: nowhere",
            "start: <|im_end|>",
            "start: a\na: a",
            '{"grammars": 3}',
            "{",
            "(" * 10_000,
            "\0",
            "x" * 2**20,
        )
    )


# In this order: what comes of tokens later fits them.
CHANGES: list[Change] = [
    *(_token_ids, _sampling, _sampling, _limits, _limits, _seed, _biases, _stops, _choices, _outputs, _names),
    *(_order, _announced, _media, _grammar),
]


def random_bytes(rng: random.Random, submit: Plain) -> bytes:
    """Noise, or a frame of which some bytes are other ones, missing or doubled."""
    frame = bytearray(encode([[submit]]))
    if rng.random() < 0.3:
        return rng.randbytes(rng.randint(1, 300))
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(frame))
        frame[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
    return bytes(frame)
