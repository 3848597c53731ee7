"""Files that other tools read (kernel)."""
