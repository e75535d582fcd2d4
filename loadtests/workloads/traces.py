"""Recorded traces in Mooncake's format: one JSON object a line.

Owns that format: `timestamp` in ms, `input_length` and `output_length` in tokens, `hash_ids` of chained
512-token blocks of which the last may be partial, and optionally `session`. And what we add to it: `images`,
each a `hash` that names its content, the `start` of its tokens in the prompt, and their number in `tokens`.
"""

import gzip
import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from loadtests.workloads.workload import ImageSpan, TraceRequest, Workload, by_arrival

BLOCK_TOKENS = 512
GRID_MILLISECONDS = 3000
GRID_TOLERANCE_MILLISECONDS = 2
FEWEST_BLOCKS_OF_A_SESSION = 2
"""Many users share a first block, so a request with only one full block says nothing about who goes on."""


def read_trace(path: Path | str, *, seed: int, block_tokens: int = BLOCK_TOKENS) -> Workload:
    """Read a .jsonl or .jsonl.gz file. Raises ValueError that names the line, or OSError."""
    path = Path(path)
    with (
        gzip.open(path, "rt", encoding="utf-8")
        if path.suffix == ".gz"
        else open(path, encoding="utf-8") as lines
    ):
        return parse_trace(path.name.split(".")[0], lines, seed=seed, block_tokens=block_tokens)


def parse_trace(name: str, lines: Iterable[str], *, seed: int, block_tokens: int = BLOCK_TOKENS) -> Workload:
    """Return a trace as a workload, beginning at its own time zero."""
    records = [
        _record(line, number, block_tokens) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    records.sort(key=lambda record: float(record["timestamp"]))
    arrivals = _arrivals([float(record["timestamp"]) for record in records], random.Random(seed))
    sessions = _sessions(records, block_tokens)
    requests = [
        TraceRequest(
            arrival_seconds=arrival,
            num_input_tokens=record["input_length"],
            num_output_tokens=max(1, record["output_length"]),
            prefix_ids=tuple(record["hash_ids"]),
            user=session,
            session=session,
            images=record["images"],
        )
        for record, arrival, session in zip(records, arrivals, sessions, strict=True)
    ]
    return Workload(name, block_tokens, by_arrival(requests))


def _record(line: str, number: int, block_tokens: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} of the trace is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"line {number} of the trace is not an object")
    for field in ("input_length", "output_length"):
        if type(record.get(field)) is not int or record[field] < 0:
            raise ValueError(f"line {number} of the trace needs a whole number as {field}")
    if type(record.get("timestamp")) not in (int, float):
        raise ValueError(f"line {number} of the trace needs a number as timestamp")
    hash_ids = record.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(type(hash_id) is int for hash_id in hash_ids):
        raise ValueError(f"line {number} of the trace needs a list of whole numbers as hash_ids")
    num_blocks = -(-record["input_length"] // block_tokens)
    if not hash_ids or len(hash_ids) != num_blocks:
        raise ValueError(
            f"line {number} of the trace has {len(hash_ids)} hash_ids; {record['input_length']} tokens "
            f"are {num_blocks} blocks of {block_tokens}"
        )
    try:
        images = _images(record.get("images", []), record["input_length"])
    except ValueError as error:
        raise ValueError(f"line {number} of the trace {error}") from error
    return {**record, "images": images, "hash_ids": ids_with_images(hash_ids, images, block_tokens)}


def _images(found: object, num_input_tokens: int) -> tuple[ImageSpan, ...]:
    """Raises ValueError."""
    if not isinstance(found, list):
        raise ValueError("needs a list as images")
    images: list[ImageSpan] = []
    end = 0
    for each in found:
        if not isinstance(each, dict):
            raise ValueError("has an image that is not an object")
        content, start, num_tokens = (each.get(name) for name in ("hash", "start", "tokens"))
        if not isinstance(content, str) or type(start) is not int or type(num_tokens) is not int:
            raise ValueError("has an image without a text as hash and whole numbers as start and tokens")
        if start < end or num_tokens < 1 or start + num_tokens > num_input_tokens:
            raise ValueError("has images that overlap, or do not lie in its prompt")
        images.append(ImageSpan(content, start, num_tokens))
        end = start + num_tokens
    return tuple(images)


def ids_with_images(ids: Sequence[int], images: Sequence[ImageSpan], block_tokens: int) -> list[int]:
    """Return the ids of a prompt's blocks with what its images are: from the first block with one on, an id
    stands for the images as well, as a block's hash does. What recorded the ids may have seen tokens alone.
    """
    found: list[int] = []
    left = sorted(images, key=lambda image: image.start, reverse=True)
    overlapping: list[ImageSpan] = []
    for number, block_id in enumerate(ids):
        start, end = number * block_tokens, (number + 1) * block_tokens
        overlapping = [image for image in overlapping if image.start + image.num_tokens > start]
        while left and left[-1].start < end:
            overlapping.append(left.pop())
        if overlapping or (found and found[-1] != ids[number - 1]):
            own = [(image.content, image.start - start) for image in overlapping]
            text = json.dumps([found[-1] if found else None, block_id, own])
            block_id = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        found.append(block_id)
    return found


def _arrivals(timestamps: Sequence[float], rng: random.Random) -> list[float]:
    """Seconds. What a 3 s clock has recorded is spread over its 3 s, in the order of the file."""
    on_grid = all(
        abs(stamp - round(stamp / GRID_MILLISECONDS) * GRID_MILLISECONDS) <= GRID_TOLERANCE_MILLISECONDS
        for stamp in timestamps
    )
    if not on_grid:
        return [stamp / 1000 for stamp in timestamps]
    ticks = [round(stamp / GRID_MILLISECONDS) for stamp in timestamps]
    # Ticks ascend, so sorting all arrivals sorts them within each tick, and request i keeps its tick.
    return sorted((tick + rng.random()) * GRID_MILLISECONDS / 1000 for tick in ticks)


def _sessions(records: Sequence[dict[str, Any]], block_tokens: int) -> list[str]:
    """Return the field, or the earlier request that this one continues: all full blocks of it come first in
    this."""
    continued: dict[int, str] = {}
    sessions: list[str] = []
    for number, record in enumerate(records):
        hash_ids = record["hash_ids"]
        session = str(record["session"]) if "session" in record else None
        if session is None:
            session = next(
                (continued[each] for each in reversed(hash_ids) if each in continued), f"s{number}"
            )
        sessions.append(session)
        num_full_blocks = record["input_length"] // block_tokens
        if num_full_blocks >= FEWEST_BLOCKS_OF_A_SESSION:
            continued[hash_ids[num_full_blocks - 1]] = session
    return sessions
