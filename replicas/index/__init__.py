"""Writes a replica's share of the block index to Redis.

The index keeps one hash per `index_stride` tokens (128) and the last full block of each prompt. Hashes are
chained, so that is enough. Each change is numbered within its epoch.

Announcements: before any prefill, the server announces the blocks that a request is about to compute
(`Submit.announced_hashes`), under an id that the router chose. An announcement ends with the request's
first token (its stored events are in the same change or an earlier one), its abort, or the end of its
stream. It travels only in the stream of changes, in the same numbered sequence; a reader that missed a
change forgets what the replica had announced. In the router that chose the id, the announcement replaces
its own prediction. A prediction that the index never confirms ends 0.2 s after the first token, or with the
request. So all routers know of a decision as soon as the stream delivers it, not a queue and a prefill
later.

Memory of Redis: above 85 % of `maxmemory` replicas remove their shares of the index one by one until it
fits, and write them again below 70 %.
"""
