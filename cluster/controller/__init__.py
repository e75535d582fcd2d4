"""The detached controller: observes, plans, executes; and the replicas as actors of Ray.

The decisions are pure. `changes.py` turns apply, scale and a rollout into a new spec. `plan.py` says which
replicas a pool keeps, starts and removes. `replica_life.py` says what follows for one replica from each
event: launched, started, asked to drain or end, ended; how long to wait after a death, and when a drain is
over. A life answers each event with orders (launch, start, watch, drain, end), `replica_keeper.py` carries
them out in Ray, and each outcome is the next event.
"""
