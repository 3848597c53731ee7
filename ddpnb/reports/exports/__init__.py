"""Files for other tools (kernel)."""
