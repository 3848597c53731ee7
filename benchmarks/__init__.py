"""Benchmarks: ratios of two sides that are measured in turns in one run."""
