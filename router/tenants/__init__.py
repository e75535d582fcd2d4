"""Tenants: their keys, what a key may do, and how much of it.

Identity: before a body is read, the key names its tenant; without keys there is one tenant. The *namespace*
follows from the tenant, or from the group that shares with it, never from the client, which can only narrow
it (`cache_salt`, another of its groups, or none). The namespace covers everything that could tell, by a
count, an id or a time, whether a prompt was sent before: the root of every chain, encoded text, checked
grammars. What even a group does not share (conversations, stored responses, named caches, users) goes by
tenant. No tenant's name is in a Redis key; there it is a keyed digest.

Limits are buckets that store what is missing, so a changed limit holds at once and a full account is
forgotten. A request's place is taken before the body is read, everything else when the prompt's tokens are
known. Answers are reserved and corrected at their end; refused and failed requests are refunded. Cached
tokens count like others, so limits reveal nothing about the cache. Routers exchange what they admitted
every 0.2 s over Redis, in the background; `docs/limits.md` has the bound on what several routers can admit
at once.
"""
