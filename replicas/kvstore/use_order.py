"""UseOrder: chunks in LRU order, where using a chunk uses all those before it.

`UseOrder` is one order, oldest first. Whenever a chunk enters it or is written, the chunks before it in its
chain become newer than it, the chain's beginning newest of all. `NewestChain` remembers the last such chain,
so that one more chunk of it moves nothing else: a prompt of n chunks that arrive one by one takes n steps,
not n².

Its *members* are the newest chunk and all before it. Each is in one of the orders or in none, and nothing in
its order is newer except members. Members of an order are kept apart, older the later they are in the chain.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from replicas.kvstore.chunk import Chunk
from replicas.protocol.blocks import BlockHash


class UseOrder:
    def __init__(self) -> None:
        self._older: OrderedDict[BlockHash, Chunk] = OrderedDict()
        self._members: dict[BlockHash, Chunk] = {}
        """Members of the newest chain."""
        self._is_sorted = True
        """Whether the members are in the order of the chain, its beginning first."""

    def __len__(self) -> int:
        return len(self._older) + len(self._members)

    def __contains__(self, key: BlockHash) -> bool:
        return key in self._older or key in self._members

    def __iter__(self) -> Iterator[Chunk]:
        """Oldest first."""
        yield from self._older.values()
        if self._members:
            self._sort()
            yield from reversed(self._members.values())

    def put_newest(self, chunk: Chunk) -> None:
        """Make a chunk the newest by itself, regardless of those before it. It is in no order, and there is
        no newest chain."""
        assert not self._members, "the newest chain has ended"
        self._older[chunk.name.key] = chunk

    def put_oldest(self, chunk: Chunk) -> None:
        """It is in no order."""
        self._older[chunk.name.key] = chunk
        self._older.move_to_end(chunk.name.key, last=False)

    def put_member(self, chunk: Chunk) -> None:
        """A member of the newest chain that is in no order."""
        if not self._members:
            self._is_sorted = True
        elif self._is_sorted:
            deepest = next(reversed(self._members.values()))
            self._is_sorted = deepest.name.last_block < chunk.name.last_block
        self._members[chunk.name.key] = chunk

    def settle(self, key: BlockHash) -> None:
        """Turn this member, if there is one, into the newest ordinary chunk."""
        chunk = self._members.pop(key, None)
        if chunk is not None:
            self._older[key] = chunk

    def take(self, key: BlockHash) -> bool:
        """Out of the order. False if it is not in it."""
        return (self._older.pop(key, None) or self._members.pop(key, None)) is not None

    def take_oldest(self) -> Chunk:
        oldest = next(iter(self))
        self.take(oldest.name.key)
        return oldest

    def clear(self) -> None:
        self._older.clear()
        self._members.clear()

    def _sort(self) -> None:
        if not self._is_sorted:
            chunks = sorted(self._members.values(), key=lambda chunk: chunk.name.last_block)
            self._members = {chunk.name.key: chunk for chunk in chunks}
            self._is_sorted = True


class NewestChain:
    """The newest chain of these orders; each order learns of members from it alone."""

    def __init__(self, *orders: UseOrder) -> None:
        self._orders = orders
        self._members: dict[BlockHash, None] = {}
        """The beginning of the chain first."""
        self._missing: BlockHash | None = None
        """The chunk before the first member, where the chain breaks off."""

    def put(
        self, chunk: Chunk, before: Iterable[Chunk], take_for: Callable[[Chunk], UseOrder | None]
    ) -> None:
        """Make the chunk and those before it, nearest first, the newest.

        `take_for` removes a chunk from its order and returns the one it belongs to, None for none. It is
        called for chunks that are not in place already, nearest first.
        """
        moved = [chunk]
        if chunk.name.key not in self._members:
            joint = None
            for each in before:
                if each.name.key in self._members:
                    joint = each.name.key
                    break
                moved.append(each)
            self._settle_after(joint)
            if joint is None:
                self._missing = moved[-1].name.parent
            self._members.update((each.name.key, None) for each in reversed(moved))
        orders = [take_for(each) for each in moved]
        for each, order in zip(reversed(moved), reversed(orders), strict=True):
            if order is not None:
                order.put_member(each)

    def leave(self, key: BlockHash) -> None:
        """Record that the chunk moved elsewhere or away: it and those after it stop being members."""
        if key in self._members:
            self._settle_after(key)
            del self._members[key]
            self._settle(key)

    def has_come(self, key: BlockHash) -> None:
        """A chunk that was nowhere is somewhere: where it was missing, the chain goes further back now."""
        if self._members and key == self._missing:
            self.end()

    def end(self) -> None:
        self._settle_after(None)

    def _settle_after(self, last: BlockHash | None) -> None:
        """Turn the members after this one into ordinary chunks."""
        while self._members and (key := next(reversed(self._members))) != last:
            del self._members[key]
            self._settle(key)

    def _settle(self, key: BlockHash) -> None:
        for order in self._orders:
            order.settle(key)
