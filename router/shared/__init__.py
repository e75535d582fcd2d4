"""What several features of a router share: sealed values in Redis, news between routers, bounded caches."""
