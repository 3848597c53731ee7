"""A function of the ranks, as the kernel names it.  (Kernel and ranks.)"""

import importlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OnRank:
    """A function of ``ddpnb.rank.calls``, by name: ``OnRank("state")``.

    Only the name is sent, and the rank looks it up: the kernel never imports the ranks' rooms.
    """

    function: str

    def __call__(self, *args: object) -> object:
        """Look the function up and call it; runs on the rank."""
        return getattr(importlib.import_module("ddpnb.rank.calls"), self.function)(*args)
