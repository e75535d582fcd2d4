"""The page at `/`: the fleet, the prefixes and the last decisions, as data; its files.

Each router watches its own requests end and keeps hashes, counts and decisions, never tokens or text: a
radix tree of block hashes (4,096 nodes, 2¹⁹ blocks, LRU), five minutes of counts, 50 decisions. `/live/…`
is computed on demand, at most once per interval for all viewers, in slices of 2 ms.

It reveals whether a prefix is cached. So it and `/explain/…` are open only to loopback under loopback's
names, unless `admin_access` says otherwise. That keeps out browsers and other machines, but not clients of
a proxy on the same machine, which come from loopback with any Host. With `admin_port` or `admin_socket`
these routes and `/metrics` move to another listener of the same process; the chart does so. Health is on
both.
"""
