"""The figure of a comparison.  Runs in the kernel."""
