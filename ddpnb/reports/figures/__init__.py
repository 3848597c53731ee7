"""The figure of a comparison (kernel)."""
