"""The contract of replicas, router and index: what they must read, write and compute alike.

Block hash: `h_0 = 0`, `h_i = SHA-256(key ‖ h_{i-1} ‖ tokens_i as little-endian u32 ‖ extras_i)[:16]` over
full blocks. The key is the namespace's root in a 64-byte block of SHA-256. The root is BLAKE2b, keyed with
the cluster secret, over tagged and length-prefixed fields, so no two fields can be confused and collisions
cannot be searched for offline. The root travels to replicas with each request and never enters the index: a
reader of the index cannot confirm a guessed prompt, even with the salt. `prompt_cache_key` is placement and
never enters the hash; `cache_salt` is isolation and always does. Extras stand for media: two images have
equal placeholder tokens and different content hashes. Blocks of versions that hashed otherwise are simply
not found. Golden vectors: `tests/golden/block_hashes.json`.

Adapters: a model card lists the loaded adapters by name and fingerprint. A name resolves to a model and at
most one adapter; both enter the namespace, and only replicas with exactly that adapter are candidates. If
several versions of an adapter are loaded, the name means the one that registered last, so all routers
agree. Users are for accounting and enter no hash: routers send a keyed digest.

Frames: the gRPC service `kvasir.v2.Replica` (`service.py`) carries msgpack structs (`frames.py`), checked
as they are decoded. `Serve` is one stream per router process and replica: submits and aborts one way, one
frame per engine step the other way, so the message rate does not grow with concurrency. `Describe` sends
the model card and tokenizer files, `ListBlocks` what the index should hold, `Drain` drains. A reader
decodes a frame in one call; if any part is wrong it decodes part by part, so a bad load is skipped and a
bad delta fails only its own request. The standard health service and reflection are there too.

Events leave the engine in the frame of the step that computed the KV. They form a multiset: an engine may
hold two copies of a block and remove them one by one, so residency is a count.

Roles: every call carries a token made from the cluster secret (`call_tokens.py`). It names the role
(router, controller or replica) and is valid for one incarnation, one method and one call; no clock is
involved. `Drain` is for the controller, pulls and take-overs for replicas, health for all callers,
everything else for any role. The token keeps out callers who merely reach the port. It does not protect the
connection: who reads the network reads prompts, and who can change it can take over an open stream. That
takes mutual TLS. A replica without a secret serves every caller and says so at start.

Leases of replicas are signed: see `lease_seal.py`.
"""
