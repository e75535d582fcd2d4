"""Usage: what each tenant, key and model has read, written and cost, by the hour.

Each token of a prompt is read from a tier, written under a lease or none, or neither. A router adds up by
hour, tenant, key and model, and writes changed totals once a second. It writes its own totals under its
own fields, so a repeated write changes nothing. Each write is a transaction that watches the router's
write counter, so a delayed write over an abandoned connection fails; the counter also reveals an emptied
Redis, and everything still held is written again. `docs/usage.md` has what can be lost.
"""
