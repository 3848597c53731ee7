"""What other numbers of ranks and other networks would do: arithmetic, no processes."""
