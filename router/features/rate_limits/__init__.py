"""Rate limits of tenants and keys, and what routers tell each other of their use.

Limits are buckets that store what is missing, so a changed limit holds at once and a full account is
forgotten. A request's place is taken before the body is read, everything else when the prompt's tokens are
known. Answers are reserved and corrected at their end; refused and failed requests are refunded. Cached
tokens count like others, so limits reveal nothing about the cache. Routers exchange what they admitted
every 0.2 s over Redis, in the background; `docs/limits.md` has the bound on what several routers can admit
at once.
"""
