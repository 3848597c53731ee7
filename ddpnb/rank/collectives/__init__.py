"""Describe and intercept the calls of ``torch.distributed`` (ranks)."""
