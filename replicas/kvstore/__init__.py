"""KV beyond the device: which chunks lie in host memory and on disk, and how they move.

Statistics travel with the engine's frames (`telling.py`), and so out of its process. The load carries
speeds and fill, by which routers decide. `TierFigures` carries the rest, for the replica's own metrics, and
only when something changed. Cached tokens by tier are counted once, in the engine, when a request is first
scheduled; answers, spans and metrics are sums of that count.

Shares of tenants (`tenant_shares.py`): each LRU order also keeps one order per tenant that has a share, so
the next victim is found without scanning chunks that stay. A tenant that has used up its share evicts its
own oldest chunk. For others, chunks beyond any share go first, then chunks of tenants without one. Chunks
within a share stay. `docs/limits.md` has what that means for users.
"""
