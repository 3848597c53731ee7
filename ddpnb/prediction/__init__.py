"""Predicts throughput for other ranks and networks by arithmetic.  Runs in the kernel."""
