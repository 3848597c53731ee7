"""Predicts throughput on other numbers of ranks and other networks by arithmetic (kernel)."""
