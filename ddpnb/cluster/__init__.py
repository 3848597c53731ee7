"""The cluster's processes: placement, calls, supervision, hangs, recovery.  Runs in the kernel."""
