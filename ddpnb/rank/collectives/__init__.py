"""Descriptions and interception of the calls of ``torch.distributed`` (ranks)."""
