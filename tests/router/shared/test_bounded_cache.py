"""A bounded cache against a list of its entries in the order of their use."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.shared.bounded_cache import BoundedCache
from tests.examples import examples

keys = st.integers(0, 7)
sizes = st.integers(1, 12)


class Caching(RuleBasedStateMachine):
    """`used` has keys and sizes, the least recently used first."""

    @initialize(max_size=st.integers(0, 20), max_entries=st.none() | st.integers(1, 4))
    def begin(self, max_size: int, max_entries: int | None) -> None:
        self.cache: BoundedCache[int, int] = BoundedCache(
            max_size, lambda key, size: size, max_entries=max_entries
        )
        self.max_size, self.max_entries = max_size, max_entries
        self.used: list[tuple[int, int]] = []
        self.num_evicted = 0

    def known(self, key: int) -> int | None:
        return dict(self.used).get(key)

    def forget(self, key: int) -> None:
        self.used = [entry for entry in self.used if entry[0] != key]

    def keep_bounds(self) -> None:
        while sum(size for _, size in self.used) > self.max_size or (
            self.max_entries is not None and len(self.used) > self.max_entries
        ):
            del self.used[0]
            self.num_evicted += 1

    @rule(key=keys, size=sizes)
    def put(self, key: int, size: int) -> None:
        self.cache.put(key, size)
        self.forget(key)
        self.used.append((key, size))
        self.keep_bounds()

    @rule(key=keys)
    def get(self, key: int) -> None:
        size = self.known(key)
        assert self.cache.get(key) == size
        if size is not None:
            self.forget(key)
            self.used.append((key, size))

    @rule(key=keys)
    def peek(self, key: int) -> None:
        assert self.cache.peek(key) == self.known(key)
        assert (key in self.cache) == (self.known(key) is not None)

    @rule(key=keys)
    def pop(self, key: int) -> None:
        assert self.cache.pop(key) == self.known(key)
        self.forget(key)

    @rule(max_size=st.integers(0, 20))
    def resize(self, max_size: int) -> None:
        self.cache.resize(max_size)
        self.max_size = max_size
        self.keep_bounds()

    @invariant()
    def nothing_is_lost_but_by_bounds(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert len(self.cache) == len(self.used)
        assert self.cache.size == sum(size for _, size in self.used)
        assert self.cache.num_evicted == self.num_evicted


TestCaching = Caching.TestCase
TestCaching.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)


def test_without_sizes_entries_are_counted() -> None:
    cache: BoundedCache[str, bool] = BoundedCache(2)
    for key in "abac":
        cache.put(key, True)
    assert ["b" in cache, "a" in cache, "c" in cache] == [False, True, True]
