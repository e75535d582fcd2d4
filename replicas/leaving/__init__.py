"""Hands a draining replica's leases over to the replicas that stay, where replicas pull from each other.

The replica asks its own store which leased chunks it has, reads from Redis which peers are ready, and
offers chains of chunks whole. The first offer goes to the first replica in the affinity order of the bucket
that came with the lease (`Submit.bucket`; `replicas/protocol/affinity.py` ranks for routers and replicas
alike). `TakeOver` names chunks and carries no KV. The receiver leases them first, for the time that is left
and within its budget and the tenant's share, then pulls them from the leaving replica like any other pull,
and answers per chunk. A chunk that did not arrive is leased no more.

A refused chain goes to the next replica, three in all. What no replica took is reported to the one where a
request for it would go, which keeps a tombstone. The hand-over runs at once when the drain begins and again
for leases of requests that still run, within the drain's deadline. `docs/memory.md` has the bounds.
"""
