"""Benchmarks of one part each, run by hand as `python -m loadtests.benches.NAME`."""
