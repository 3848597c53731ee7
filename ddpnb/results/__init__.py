"""Stores the measurements of runs and computes every result from them.  Runs in the kernel."""
