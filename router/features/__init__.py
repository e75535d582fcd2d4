"""Parts of a router beside the way of a request, each in a package of its own.

A feature owns its settings' meaning, its store, its routes, its instruments and its background task, and
hooks into the way of a request where `ApiContext` has a place for it. Features do not import each other,
and nothing below imports a feature. `router/assembly.py` goes over the list.
"""
