"""How does the notebook name a function that runs on a rank?  (Both sides.)"""

import importlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OnRank:
    """A call by name of a function of ``ddpnb.rank.calls``: ``OnRank("state")()``.

    Only the name crosses: the notebook's side never imports the ranks', and looks nothing up.
    """

    function: str

    def __call__(self, *args: object) -> object:
        """Find the function and call it; runs on the rank, where its module is loaded."""
        return getattr(importlib.import_module("ddpnb.rank.calls"), self.function)(*args)
