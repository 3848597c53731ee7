"""The asynchronous runtime (ranks)."""
