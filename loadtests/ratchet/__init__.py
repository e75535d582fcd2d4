"""The ratchet: figures that a change may not make worse unseen, and the file that has them.

Virtual time is the same on every machine, so what a small fleet makes of a seeded workload can be a test.
"""
