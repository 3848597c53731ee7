"""The exercises of the lessons, and the checks of ``%ddp_exercise``."""
