"""A server that runs already as the engine of a replica: `vllm serve` or SGLang, asked over HTTP.

Promises the whole contract of an engine for what a server offers without being changed. Prompts go to it as
token ids, with the namespace's root as `cache_salt`, so the server's cache is divided as ours is. How a kind
of server is spoken to is a file for each: `vllm_dialect.py`, `sglang_dialect.py`.

Cache events come over ZMQ, numbered and replayed after a gap; they bring tokens and the salt back, and name
blocks by our hashes (`replicas/kvcache/hash_map.py`). Cached tokens come with the end of an answer, as the
server counts them; if it does not tell them, they are unknown. Without events that can be mapped, what the
server holds is predicted (`believed.py`), and every load that is reported says so.

One incarnation of the server is one epoch of the replica. A server that goes, hangs or starts anew ends the
replica's process. Its supervisor starts it again, and it waits for the server.

Of two vLLM servers with NIXL one can compute a prompt for the other (`nixl.py`).

Not to be had over HTTP, and refused or left out: images, leases, published beginnings, tiers of ours, pulls.
"""
