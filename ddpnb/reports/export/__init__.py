"""Export of comparisons to files for other tools.  Runs in the kernel."""
