"""Buffers, the shared-memory all-reduce, the parameter server and the work queue (ranks)."""
