"""See data-parallel training from a notebook."""
