"""Export of comparisons to files for other tools (kernel)."""
