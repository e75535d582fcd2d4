"""Named caches: beginnings of prompts that clients have named, kept in Redis under the cluster secret.

A cache is a record and the client's content, and no KV. KV is kept by the lease that creating, using and
extending the cache ask for. The body of a request that names a cache is completed before anything reads it,
so preparing, hashing, routing and explaining know nothing of caches.

Record and content are sealed with AES-256-GCM under a key made of the cluster secret, each bound to its
name in Redis; a value that does not open counts as missing. Without a secret there are no named caches.
Content goes at expiry; the record stays a day longer, so that a 404 says when and why. Changes are
transactions that watch what they read: a deletion wins over a concurrent extension, and several routers
never exceed the bounds, in all and per tenant. A request waits at most 1 s for Redis, and only for a cache
that its router has not used within 2 s. While Redis is away, a known cache is good until it expires. A
writer to Redis without the secret can delete caches, bring back an old record, or fill the index.
"""
