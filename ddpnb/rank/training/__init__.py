"""The training loop, with a run's checks and evaluation.  Runs on the ranks."""
