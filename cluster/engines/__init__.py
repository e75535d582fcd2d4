"""Finds servers that run already, and keeps looking.

`finders.py` has one finder for each way of an EngineSource; a look returns addresses. `belief.py` decides
which addresses count as there, so that one bad answer takes no server away. `asking.py` asks each server for
its data-parallel ranks; one that does not answer is asked again, more and more rarely. `watch.py` runs all of
that for the pools of a fleet and reports changes.
"""
