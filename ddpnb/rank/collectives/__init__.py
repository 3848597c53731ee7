"""Calls of ``torch.distributed``: what they are, and who hears of them (ranks)."""
