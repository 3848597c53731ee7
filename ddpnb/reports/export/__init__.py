"""Exported files for other tools (kernel)."""
