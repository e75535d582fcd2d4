"""The gRPC server of a replica, and the count of the requests that it has taken.

Load: a replica counts a request the moment it arrives, with the tokens that the router expects it to
compute, and tells every router at once. The engine would count it only after its next step, up to some
hundred milliseconds later, and routers that cannot see each other's requests would pile them onto one
replica. Each frame says how many submits of its stream the load includes; the router adds those sent since,
so every request is counted exactly once.

The server also announces: the moment it takes a request it tells the index which blocks are coming
(`replicas/index/`).
"""
