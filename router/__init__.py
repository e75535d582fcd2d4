"""The front door that knows where prefixes live.

Several routers on one port: `python -m router --processes N` binds the port, forks N routers and keeps them
running; the parent serves nothing. Each router accepts from its own SO_REUSEPORT socket, so the kernel
spreads connections evenly. The parent and all siblings hold every socket open: a connection that waits 50
ms, because its router died, is frozen or is not ready, is accepted by a sibling. (With one shared socket,
one router takes nearly everything on busy cores; a socket that no other process has open is reset when its
router dies.) A new router accepts only once it has found replicas. A stopping router accepts no more,
answers open connections with `connection: close`, and closes those idle for a second. If the parent dies,
its routers finish and end.

Errors form one tree (`errors.py`). HTTP status codes exist only in `app.py` and `api/`.
"""
