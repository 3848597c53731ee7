"""What was measured, how it is stored, and what follows from it (kernel)."""
