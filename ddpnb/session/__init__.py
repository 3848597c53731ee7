"""One notebook's state: its cluster, cells, comparisons and background work (kernel)."""
