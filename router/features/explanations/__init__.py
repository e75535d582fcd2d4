"""Explanations of cache misses: found for each request, kept for a while, and told to their tenant.

`router/explain` finds the causes, the nearest earlier prompt and the place in the client's body. This package
decides when, keeps what is found, serves `GET /v1/cache/explain/{id}`, and asks other routers for theirs.
"""
