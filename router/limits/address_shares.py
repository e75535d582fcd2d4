"""AddressShares: how much of something each client address holds; one may have a share of the whole.

Owns the rule that connections, bodies, large bodies and requests have in common. Behind a load balancer all
clients come from one address, so the share is half unless it is set. A Unix socket has no address, and only
the whole bounds it.
"""


class AddressShares:
    def __init__(self, most: int, *, address_share: float) -> None:
        self.num = 0
        self._most = most
        self._most_of_address = max(1, int(most * address_share))
        self._of_address: dict[str, int] = {}

    def has_room(self, address: str | None, num: int = 1) -> bool:
        if self.num + num > self._most:
            return False
        return address is None or self._of_address.get(address, 0) + num <= self._most_of_address

    def take(self, address: str | None, num: int = 1) -> bool:
        """Add to what an address holds; False, and nothing, where there is no room."""
        has_room = self.has_room(address, num)
        if has_room:
            self.add(address, num)
        return has_room

    def add(self, address: str | None, num: int = 1) -> None:
        self.num += num
        if address is not None:
            held = self._of_address.get(address, 0) + num
            if held:
                self._of_address[address] = held
            else:
                self._of_address.pop(address, None)
