"""What a peer may send, and everything that it may not."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.layout import ChunkHeader, LayoutId, encode
from replicas.kvstore.pulling.incoming import ChunkKind, PullFailed, Wanted, incoming
from replicas.protocol.pulls import PullPart
from tests.replicas.kvstore.chunk_images import (
    LAYOUT,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    fill,
    header,
    image,
    payload,
    slots,
)
from tests.replicas.kvstore.chunk_names import key, name

KIND = ChunkKind(LAYOUT.digest(), 128, 4, PAYLOAD_BYTES, SLOT_BYTES)


def wanted(*paths: str) -> list[Wanted]:
    memory = slots(len(paths))
    return [Wanted(name(path), number, memory[number]) for number, path in enumerate(paths)]


def parts(*images: bytes | bytearray, size: int = 3000) -> list[PullPart]:
    return [
        PullPart(index, bytes(each[at : at + size]))
        for index, each in enumerate(images)
        for at in range(0, len(each), size)
    ]


def named(**fields: object) -> bytearray:
    """The image of chunk "a" with other fields, its checksums right."""
    made = bytearray(SLOT_BYTES)
    changed = replace(header("a"), **fields)  # type: ignore[arg-type]
    fill(memoryview(made), "a")
    encode(changed, memoryview(made))
    return made


@pytest.mark.parametrize("size", [1, 4096, 4097, 1 << 20])
def test_chunks_come_whole_and_in_order(size: int) -> None:
    chunks = wanted("a", "ab")
    came = list(incoming(parts(image("a"), image("ab"), size=size), chunks, KIND))
    assert [chunk.name for chunk, _ in came] == [name("a"), name("ab")]
    assert came[1][1] == header("ab")
    assert bytes(chunks[1].memory[4096 : 4096 + PAYLOAD_BYTES]) == payload("ab")


def test_a_peer_may_have_less() -> None:
    assert list(incoming([], wanted("a"), KIND)) == []
    assert len(list(incoming(parts(image("a")), wanted("a", "ab"), KIND))) == 1


def flipped(at: int) -> bytearray:
    made = image("a")
    made[at] ^= 1
    return made


LIES: dict[str, Callable[[], Sequence[PullPart]]] = {
    "another chunk": lambda: parts(image("b")),
    "a flipped bit in the payload": lambda: parts(flipped(5000)),
    "a flipped bit in the header": lambda: parts(flipped(60)),
    "a flipped bit in the checksum": lambda: parts(flipped(4090)),
    "another layout": lambda: parts(named(layout=LayoutId(bytes(16)))),
    "another parent": lambda: parts(named(name=ChunkName(key("a"), key("b"), 3))),
    "another position": lambda: parts(named(name=ChunkName(key("a"), None, 7))),
    "fewer tokens": lambda: parts(named(num_tokens=127)),
    "fewer writers": lambda: parts(named(writers=())),
    "a shorter payload": lambda: parts(named(payload_bytes=PAYLOAD_BYTES - 1)),
    "a longer image": lambda: parts(image("a") + bytes(1), size=SLOT_BYTES + 1),
    "half a chunk": lambda: parts(image("a")[:-1]),
    "one byte": lambda: [PullPart(0, b"x")],
    "the second first": lambda: [PullPart(1, bytes(image("ab")))],
    "one more": lambda: parts(image("a"), image("ab")),
    "zeros": lambda: parts(bytes(SLOT_BYTES)),
}


@pytest.mark.parametrize("lie", LIES)
def test_no_lie_is_believed(lie: str) -> None:
    chunks = wanted("a")
    came: list[ChunkHeader] = []
    with pytest.raises(PullFailed):
        for _, found in incoming(LIES[lie](), chunks, KIND):
            came.append(found)
    assert came == ([header("a")] if lie == "one more" else [])


def test_what_came_before_a_lie_counts() -> None:
    chunks = wanted("a", "ab")
    stream = incoming(parts(image("a"), image("ax")), chunks, KIND)
    assert next(stream)[1] == header("a")
    with pytest.raises(PullFailed):
        next(stream)


def test_an_endless_stream_is_left_at_once() -> None:
    num_taken = 0

    def endless() -> Iterator[PullPart]:
        nonlocal num_taken
        while True:
            num_taken += 1
            yield PullPart(0, bytes(1000))

    with pytest.raises(PullFailed):
        list(incoming(endless(), wanted("a"), KIND))
    assert num_taken <= SLOT_BYTES // 1000 + 1
