"""The asynchronous runtime, and sums in shared memory (ranks)."""
