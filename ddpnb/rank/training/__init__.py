"""The one training loop and what stands around it (ranks)."""
