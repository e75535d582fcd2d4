"""The shelf of images: its bound, its order, and what is held."""

import random

import pytest

from replicas.media.image_cache import CachedImage, ImageCache


def item(num_bytes: int) -> CachedImage[int]:
    return CachedImage((1, 2), num_bytes, num_bytes)


def name(number: int) -> bytes:
    return bytes([number]) * 32


def test_the_oldest_goes_first_and_what_is_looked_at_is_new() -> None:
    shelf: ImageCache[int] = ImageCache(30)
    assert all(shelf.put(name(number), item(10)) for number in range(3))
    assert shelf.has(name(0))
    assert shelf.put(name(3), item(10))
    assert [shelf.has(name(number)) for number in range(4)] == [True, False, True, True]
    assert shelf.num_bytes == 30


def test_what_is_held_is_never_forgotten_and_leaves_no_room_for_more() -> None:
    shelf: ImageCache[int] = ImageCache(20)
    shelf.put(name(0), item(10))
    shelf.put(name(1), item(10))
    held = shelf.hold([name(0), name(1), name(0)])
    assert held is not None and [each.num_bytes for each in held] == [10, 10, 10]
    assert not shelf.put(name(2), item(1))
    shelf.clear()
    assert (len(shelf), shelf.num_held) == (2, 3)
    shelf.release([name(0), name(1)])
    assert not shelf.put(name(2), item(11)), "one hold of the first is left"
    assert shelf.put(name(2), item(10)) and not shelf.has(name(1))
    shelf.release([name(0)])
    shelf.clear()
    assert (len(shelf), shelf.num_bytes, shelf.num_held) == (0, 0, 0)


def test_nothing_is_held_if_one_is_missing() -> None:
    shelf: ImageCache[int] = ImageCache(20)
    shelf.put(name(0), item(10))
    assert shelf.hold([name(0), name(1)]) is None
    assert shelf.num_held == 0


def test_what_does_not_fit_pushes_nothing_out() -> None:
    shelf: ImageCache[int] = ImageCache(50)
    for number in range(5):
        shelf.put(name(number), item(10))
    shelf.hold([name(0), name(0)])
    assert not shelf.put(name(9), item(41))
    assert len(shelf) == 5
    shelf.release([name(0)])
    assert not shelf.put(name(9), item(41)), "one hold is left"
    assert shelf.put(name(9), item(40)) and len(shelf) == 2


def test_what_is_larger_than_the_shelf_does_not_fit() -> None:
    shelf: ImageCache[int] = ImageCache(20)
    assert not shelf.put(name(0), item(21))
    assert (len(shelf), shelf.num_bytes) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_it_does_what_a_list_does(seed: int) -> None:
    rng = random.Random(seed)
    shelf: ImageCache[int] = ImageCache(50)
    slow: list[tuple[bytes, int]] = []
    holds: list[list[bytes]] = []

    def num_holders(key: bytes) -> int:
        return sum(hold.count(key) for hold in holds)

    def touch(key: bytes) -> None:
        slow.sort(key=lambda kept: kept[0] == key)

    for _ in range(400):
        key, size = name(rng.randrange(8)), rng.randrange(1, 30)
        match rng.choice(["put", "hold", "release"]):
            case "put":
                known = any(kept == key for kept, _ in slow)
                fits = known or sum(one for kept, one in slow if num_holders(kept)) + size <= 50
                for kept in list(slow):
                    if known or not fits or sum(one for _, one in slow) + size <= 50:
                        break
                    if not num_holders(kept[0]):
                        slow.remove(kept)
                if known:
                    touch(key)
                elif fits:
                    slow.append((key, size))
                assert shelf.put(key, item(size)) == fits
            case "hold":
                wanted = [name(rng.randrange(8)) for _ in range(rng.randrange(1, 4))]
                there = all(any(kept == each for kept, _ in slow) for each in wanted)
                if there:
                    holds.append(wanted)
                    for each in wanted:
                        touch(each)
                assert (shelf.hold(wanted) is not None) == there
            case "release" if holds:
                shelf.release(holds.pop(rng.randrange(len(holds))))
        assert shelf.num_bytes == sum(one for _, one in slow) <= 50
        assert shelf.num_held == sum(map(len, holds))
