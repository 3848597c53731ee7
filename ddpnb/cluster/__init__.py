"""The cluster's processes: placement, calls, supervision, hangs, recovery (kernel)."""
