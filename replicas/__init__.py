"""A model server with a paged, prefix-cached KV cache."""
