"""Benchmarks of backends, in ratios to what the machine itself can do in the same run."""
