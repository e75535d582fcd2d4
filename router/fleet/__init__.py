"""The replicas as a router knows them: who is there, a stream to each, and what their caches hold.

Every router mirrors the index: it reads each replica's set at start and follows the stream of numbered
changes. A gap or an unknown epoch means reading that replica's set again. If Redis is late, away or empty,
the mirror is stale; that is never an error, and no request waits for Redis here.

Each record, change, load and frame is decoded by itself (`bounds.py`): a bad one is skipped, logged once
and counted.
"""
