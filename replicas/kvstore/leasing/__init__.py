"""Leases of prefixes: how long each is kept below the device, and what became of each promise.

A lease never holds a place on the device, so it binds no request to a replica's batch. A client's wish
travels as *(end block, seconds)* in `Submit.leases`, as a hint. The directory grants whole chunks within a
budget, `lease_share` of each tier, or refuses with a reason that `PromptUsage` reports. A tenant's part of
the budget is `Submit.lease_share`, a quarter by default; tenants are keyed digests. Without API keys all
callers are one tenant, which may use the whole budget.

The longest of several leases on a chunk wins. Leased chunks without a file are kept apart in host memory
and are evicted last. A lease of an hour or more is written at once, before all other writes, and synced.
Leased files are not evicted. When the last copy of a leased chunk goes, the lease is *broken*: a tombstone
stays until its end, so that the prompt that misses the chunk is told why. Expiry deletes nothing.

Time is the monotonic clock's. The journal keeps the wall-clock end and the seconds of each lease on disk,
so a restart continues with the rest.
"""
