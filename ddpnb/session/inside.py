"""What looks inside: asks the ranks, and returns what a notebook shows (kernel)."""
