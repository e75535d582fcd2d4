"""A model server with a paged, prefix-cached KV cache.

The start-up proof: before a replica registers, it runs a probe prompt on the model and with each adapter,
and compares the hashes that its engine reports with those of `hash_blocks()`. On a mismatch it refuses to
start.
"""
