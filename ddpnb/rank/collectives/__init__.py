"""Describes and intercepts this rank's calls to ``torch.distributed``.  Runs on the ranks."""
