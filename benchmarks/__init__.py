"""Benchmarks: each prints its table; results with their machine are in README.md."""
