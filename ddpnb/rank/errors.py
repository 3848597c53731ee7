"""Errors that a rank raises because of another one (ranks)."""


class ConsequenceError(RuntimeError):
    """Another rank has failed or gone, or this one was freed from its wait; the cause is there."""


class RankLostError(ConsequenceError):
    """A rank left in the middle of a run, or makes no progress: the run is over."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"Rank {rank} left in the middle of the run, or no longer answers "
            "(slow steps need a longer timeout, as in async:timeout=120)."
        )
        self.rank = rank


class RunCancelledError(ConsequenceError):
    """This rank was not waiting; it was ended because another rank had failed."""
