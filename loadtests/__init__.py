"""Load tests and benchmarks: they print figures, and RESULTS.md keeps them."""
