"""Code that several features of a router share: stores and news over Redis, bounded caches."""
