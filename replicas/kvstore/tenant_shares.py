"""TierShares: which tenant's chunks use a tier, and which are evicted when room is short.

Owns the amounts. Pure. A tenant with a share may always hold that much: no chunk within it is evicted for
others. It may hold more while there is room. Without room, a tenant beyond its share replaces its own oldest
chunk. For everyone else, chunks beyond shares are evicted first, then chunks without a share, and only then
the oldest of all. A chunk is charged to the tenant whose request brought it; a restored one to its first
user. All tenants without a share are treated as one.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from replicas.kvstore.chunk import Chunk, StoreTenant
from replicas.kvstore.leasing.leases import EVERYBODY, TenantTag
from replicas.kvstore.use_order import UseOrder
from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import Submit

SPARE_TENANTS = 1024


class Tenancy(NamedTuple):
    """Owner of a request. A share of 0 sets no bound of its own."""

    tag: TenantTag = EVERYBODY
    lease_share: float = 0.0
    store_share: float = 0.0


NOBODYS = Tenancy()


def tenancy_of(submit: Submit) -> Tenancy:
    return Tenancy(TenantTag(submit.tenant), submit.lease_share, submit.store_share)


class TenantShares:
    """The tenants that have shares, as their requests last said."""

    def __init__(self) -> None:
        self._tenants: dict[TenantTag, StoreTenant] = {}
        self._most = SPARE_TENANTS

    def of(self, tenancy: Tenancy) -> StoreTenant | None:
        """None has no share."""
        tenant = self._tenants.get(tenancy.tag)
        if tenant is not None:
            tenant.share = tenancy.store_share
        if tenancy.store_share <= 0 or tenancy.tag == EVERYBODY:
            return None
        if tenant is None:
            if len(self._tenants) >= self._most:
                self._forget_idle()
            tenant = self._tenants[tenancy.tag] = StoreTenant(tenancy.store_share)
        return tenant

    def known(self, tenancy: Tenancy) -> Tenancy:
        """Return a tenancy from a record with the share that its own requests have set here."""
        tenant = self._tenants.get(tenancy.tag)
        return tenancy if tenant is None else tenancy._replace(store_share=tenant.share)

    def share_of(self, tag: TenantTag) -> float:
        """0 is none of its own."""
        tenant = self._tenants.get(tag)
        return 0.0 if tenant is None else tenant.share

    def _forget_idle(self) -> None:
        self._tenants = {tag: tenant for tag, tenant in self._tenants.items() if tenant.num_held}
        self._most = max(SPARE_TENANTS, 2 * len(self._tenants))


class SharedOrder(UseOrder):
    """Chunks in LRU order, and each tenant's in an order of its own, once there is one with a share."""

    def __init__(self, tier: "TierShares") -> None:
        super().__init__()
        self._tier = tier
        self._parts: dict[StoreTenant | None, UseOrder] | None = None

    def begin_parts(self) -> None:
        """Start with chunks that belong to no tenant with a share."""
        common = UseOrder()
        for chunk in self._older.values():
            common.put_newest(chunk)
        for chunk in self._members.values():
            common.put_member(chunk)
        self._parts = {None: common}

    def of(self, tenant: StoreTenant | None) -> Iterator[Chunk]:
        """Oldest first."""
        part = None if self._parts is None else self._parts.get(tenant)
        return iter(()) if part is None else iter(part)

    def put_newest(self, chunk: Chunk) -> None:
        super().put_newest(chunk)
        if self._parts is not None:
            self._entered(chunk).put_newest(chunk)

    def put_oldest(self, chunk: Chunk) -> None:
        super().put_oldest(chunk)
        if self._parts is not None:
            self._entered(chunk).put_oldest(chunk)

    def put_member(self, chunk: Chunk) -> None:
        super().put_member(chunk)
        if self._parts is not None:
            self._entered(chunk).put_member(chunk)

    def settle(self, key: BlockHash) -> None:
        chunk = self._members.get(key)
        super().settle(key)
        if chunk is not None and self._parts is not None:
            self._parts[chunk.tenant].settle(key)

    def take(self, key: BlockHash) -> bool:
        if self._parts is None:  # as above, without a call: this is where most time goes
            return (self._older.pop(key, None) or self._members.pop(key, None)) is not None
        chunk = self._older.get(key) or self._members.get(key)
        if chunk is None:
            return False
        super().take(key)
        part = self._parts[chunk.tenant]
        part.take(key)
        if not part and chunk.tenant is not None:
            del self._parts[chunk.tenant]
        self._tier.count(chunk.tenant, -1)
        return True

    def clear(self) -> None:
        for key in [chunk.name.key for chunk in self]:
            self.take(key)

    def _entered(self, chunk: Chunk) -> UseOrder:
        assert self._parts is not None
        self._tier.count(chunk.tenant, 1)
        part = self._parts.get(chunk.tenant)
        if part is None:
            part = self._parts[chunk.tenant] = UseOrder()
        return part


class TierShares:
    """Shares of a tier of that many chunks, each of which is in one of several orders."""

    def __init__(self, num_chunks: int, num_orders: int) -> None:
        self.num_chunks = num_chunks
        self.orders = [SharedOrder(self) for _ in range(num_orders)]
        self._is_shared = False
        self._held: dict[StoreTenant, int] = {}
        self._over: OrderedDict[StoreTenant, None] = OrderedDict()
        """Tenants beyond their share; the first is evicted from next."""

    def begin_shares(self) -> None:
        """Before the first chunk of a tenant that has a share."""
        if not self._is_shared:
            self._is_shared = True
            for order in self.orders:
                order.begin_parts()

    def num_held(self, tenant: StoreTenant) -> int:
        return self._held.get(tenant, 0)

    def room_of(self, tenant: StoreTenant) -> int:
        """Chunks that are its share."""
        return int(tenant.share * self.num_chunks)

    def count(self, tenant: StoreTenant | None, change: int) -> None:
        if tenant is None:
            return
        held = self._held[tenant] = self.num_held(tenant) + change
        tenant.num_held += change
        if not held:
            del self._held[tenant]
        if held > self.room_of(tenant):
            self._over[tenant] = None
        else:
            self._over.pop(tenant, None)

    def victims(self, asking: StoreTenant | None, orders: Sequence[SharedOrder]) -> Iterator[Chunk]:
        """Yield chunks that may be evicted for one more chunk of this tenant, in order of preference;
        `orders` are given in that order too."""
        has_its_share = asking is not None and self.num_held(asking) >= self.room_of(asking)
        if has_its_share:
            yield from _of(asking, orders)
        for _ in range(len(self._over)):
            tenant = next(iter(self._over))
            self._over.move_to_end(tenant)  # it gives again when the others have
            if tenant is not asking:
                yield from _of(tenant, orders)
        if self._is_shared:
            yield from _of(None, orders)
        if not has_its_share:
            for order in orders:
                yield from order


def _of(tenant: StoreTenant | None, orders: Sequence[SharedOrder]) -> Iterator[Chunk]:
    for order in orders:
        yield from order.of(tenant)
