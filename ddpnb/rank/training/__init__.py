"""The training loop, with a run's checks, context, timing and evaluation.  Runs on the ranks."""
