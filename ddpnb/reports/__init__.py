"""Reports: figures, tables and texts from recorded runs, and the output of cells (kernel)."""
