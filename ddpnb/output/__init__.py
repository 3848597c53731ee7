"""Shows the output of cells that run on ranks.  Runs in the kernel."""
