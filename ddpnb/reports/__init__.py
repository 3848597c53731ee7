"""What is shown: pure functions of recorded runs, and the output of cells (kernel)."""
