"""Pages: joins the pages of a server to blocks of several pages.

Pure. Owns the pages that are held. A block is stored once its last page is, and is gone with the first of its
pages that goes. Prompts that part inside a block share its first pages.
"""

from collections.abc import Iterable
from typing import NamedTuple

from replicas.kvcache.hash_map import UnknownBlock, root_in

Hash = int | bytes


class _KvPage(NamedTuple):
    parent: Hash | None
    place: int
    token_ids: tuple[int, ...]
    keys: list[object] | None


class Block(NamedTuple):
    """`name` and `parent` are the hashes of the last pages of a block and of the one before it."""

    name: Hash
    parent: Hash | None
    token_ids: list[int]
    keys: list[object] | None


class Pages:
    def __init__(self, page_size: int, num_pages: int) -> None:
        self._page_size = page_size
        self._num_pages = num_pages
        self._pages: dict[Hash, _KvPage] = {}
        self._blocks: dict[Hash, tuple[Hash, ...]] = {}
        """The pages of each block."""
        self._blocks_of: dict[Hash, tuple[Hash, ...]] = {}
        """The blocks of each page: nearly always one, so its pages share one tuple."""

    def stored(
        self, hashes: Iterable[Hash], parent: Hash | None, token_ids: list[int], keys: list[object] | None
    ) -> list[Block]:
        """Add a run of pages; returns the blocks that are whole with it. Raises UnknownBlock for a run that
        begins nowhere."""
        place = 0
        if parent is not None:
            before = self._pages.get(parent)
            if before is None:
                raise UnknownBlock(f"the parent {parent!r} of a stored page is not held")
            place = before.place + 1
        elif root_in(keys) is None:
            raise UnknownBlock("a prompt's first page comes without a namespace")
        whole: list[Block] = []
        for number, name in enumerate(hashes):
            run = tuple(token_ids[number * self._page_size : (number + 1) * self._page_size])
            if name not in self._pages:
                self._pages[name] = _KvPage(parent, place, run, None if place else keys)
                if (place + 1) % self._num_pages == 0:
                    whole += self._joined(name)
            parent, place = name, place + 1
        return whole

    def removed(self, hashes: Iterable[Hash]) -> list[Hash]:
        """Remove pages; returns the names of blocks that are gone with them."""
        gone: list[Hash] = []
        for page in hashes:
            self._pages.pop(page, None)
            for name in self._blocks_of.pop(page, ()):
                gone.append(name)
                for other in self._blocks.pop(name):
                    self._forget(name, other)
        return gone

    def _forget(self, block: Hash, page: Hash) -> None:
        rest = tuple(each for each in self._blocks_of.get(page, ()) if each != block)
        if rest:
            self._blocks_of[page] = rest
        else:
            self._blocks_of.pop(page, None)

    def clear(self) -> None:
        self._pages.clear()
        self._blocks.clear()
        self._blocks_of.clear()

    def _joined(self, name: Hash) -> list[Block]:
        """Return the block that ends with a page, unless one of its pages is gone."""
        names, pages = [name], [self._pages[name]]
        while len(pages) < self._num_pages:
            parent = pages[-1].parent
            page = None if parent is None else self._pages.get(parent)
            if parent is None or page is None:
                return []
            names.append(parent)
            pages.append(page)
        self._blocks[name] = tuple(names)
        alone = (name,)
        for each in names:
            self._blocks_of[each] = self._blocks_of[each] + alone if each in self._blocks_of else alone
        token_ids = [token for page in reversed(pages) for token in page.token_ids]
        return [Block(name, pages[-1].parent, token_ids, pages[-1].keys)]
