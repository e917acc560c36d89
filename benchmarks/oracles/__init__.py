"""Slow solvers that state optima independently, for tests and benchmarks."""
