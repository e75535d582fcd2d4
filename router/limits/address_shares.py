"""AddressShares: how much of something each client address holds; one may have a share of the whole.

Owns the rule that connections, bodies, large bodies and requests have in common. Behind a load balancer all
clients come from one address, so the share is half unless it is set. A Unix socket has no address, and only
the whole bounds it.
"""

from collections import Counter


class AddressShares:
    def __init__(self, most: int, *, address_share: float) -> None:
        self.num = 0
        self._most = most
        self._most_of_address = max(1, int(most * address_share))
        self._of_address: Counter[str] = Counter()

    def has_room(self, address: str | None, num: int = 1) -> bool:
        return self.num + num <= self._most and self.is_within_share(address, num)

    def is_within_share(self, address: str | None, num: int = 1) -> bool:
        return address is None or self._of_address[address] + num <= self._most_of_address

    def add(self, address: str | None, num: int = 1) -> None:
        self.num += num
        if address is not None:
            self._of_address[address] += num
            if not self._of_address[address]:
                del self._of_address[address]
