"""One notebook's cluster, cells, comparisons and background work.  Runs in the kernel."""
