"""Parts of a router beside the way of a request, each in a package of its own.

A feature owns its settings' meaning, its store, its routes, its instruments, its background task and its
hooks into a request (`router/feature.py`). The pipeline calls the hooks and knows no feature. Features do
not import each other, and nothing below imports a feature. `router/assembly.py` goes over the list.
"""
