"""Caller: who asks. A tenant, by one of its keys, and what that key may do.

Plain data, made once per key, and by the hundred thousand: none of it is in a cycle, so the collector need
not walk it. Where keys come from and how a request shows one is known elsewhere.
"""

import enum
from collections.abc import Mapping

import msgspec

DEFAULT_TENANT = "default"
"""Tenant of everything without keys."""

DEFAULT_LEASE_SHARE = 0.25
"""For a tenant without `lease_share`."""


class Right(enum.StrEnum):
    """Permissions of a key beyond generating answers."""

    PRIORITY = "priority"
    """A request's wish to go before others of its tenant counts."""
    EXPLAIN = "explain"
    """To be told why prompts of the tenant were not read from cache, with places and times."""
    ADMIN = "admin"
    """All of it: to see every tenant's figures and the fleet, and to publish prefixes for everyone."""


class Limits(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True, forbid_unknown_fields=True
):
    """Limits of a tenant hold for all its keys together, those of a key within them. None bounds nothing,
    except `lease_share`: see `Caller`.

    `tokens_per_minute` counts the tokens of prompts and answers. `max_sequences` are served at a time. Shares
    are of the whole: of the room for leases, and of the memory below the devices.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_sequences: int | None = None
    max_context: int | None = None
    lease_share: float | None = None
    store_share: float | None = None


NO_LIMITS = Limits()


class Tenant(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """`groups` are those with which it agrees to share KV, the one that holds by default first. `weight` is
    its part of an overloaded fleet, beside those of others. `slo_seconds` is the time to the first token
    after which an answer is worth nothing to it."""

    name: str
    groups: tuple[str, ...] = ()
    weight: float = 1.0
    slo_seconds: float | None = None
    limits: Limits = NO_LIMITS


class Caller(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`group` is the one with which this request shares KV, one of its tenant's. `key_id` names the key and
    is no secret; None where there are no keys."""

    tenant: Tenant
    key_id: str | None = None
    group: str | None = None
    rights: frozenset[Right] = frozenset()
    limits: Limits = NO_LIMITS

    @property
    def owner(self) -> str | None:
        """Owner of a request and all that is made of it; None without keys."""
        return None if self.key_id is None else f"tenant:{self.tenant.name}"

    @property
    def lease_share(self) -> float | None:
        """The tenant's share of the room for leases and of all named caches. None without keys: the one
        tenant may have all."""
        if self.key_id is None:
            return None
        share = self.tenant.limits.lease_share
        return DEFAULT_LEASE_SHARE if share is None else share

    @property
    def namespace(self) -> str | None:
        """The root of its prompts' chains besides the salt: who may share KV."""
        return self.owner if self.group is None else f"group:{self.group}"

    @property
    def max_context(self) -> int | None:
        """Tokens that a prompt and one answer to it may have together, beside what the model has room for."""
        own, shared = self.limits.max_context, self.tenant.limits.max_context
        return own if shared is None or (own is not None and own < shared) else shared

    def may(self, right: Right) -> bool:
        return right in self.rights or Right.ADMIN in self.rights


OPEN_CALLER = Caller(tenant=Tenant(name=DEFAULT_TENANT), rights=frozenset({Right.EXPLAIN}))
"""Everybody, where there are no keys: one tenant, whose wishes to go first count only by the router's
settings."""

CALLER = "kvasir.caller"
"""Key of the caller in a request's scope."""


def caller_of(scope: Mapping[str, object]) -> Caller:
    """Return the caller of an admitted request."""
    caller = scope.get(CALLER, OPEN_CALLER)
    assert isinstance(caller, Caller)
    return caller


def tenant_of(scope: Mapping[str, object]) -> str:
    """Return the tenant whose stored responses, named caches and the like a request sees."""
    return caller_of(scope).tenant.name
