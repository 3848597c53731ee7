"""Reports on recorded runs, and the output of cells.  Runs in the kernel."""
