"""API keys: their tenants, what a key may do, and where keys come from.

Before a body is read, the key names its tenant; without keys there is one tenant. The *namespace*
follows from the tenant, or from the group that shares with it, never from the client, which can only narrow
it (`cache_salt`, another of its groups, or none). The namespace covers everything that could tell, by a
count, an id or a time, whether a prompt was sent before: the root of every chain, encoded text, checked
grammars. What even a group does not share (conversations, stored responses, named caches, users) goes by
tenant. No tenant's name is in a Redis key; there it is a keyed digest.
"""
