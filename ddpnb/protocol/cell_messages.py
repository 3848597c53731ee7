"""Messages about cells and scripts, between the kernel and the ranks.  Used in every process."""

from dataclasses import dataclass
from typing import NamedTuple

from ddpnb.protocol.trace import RankSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script to run on a rank as if ``torchrun`` had started it."""

    name: str
    """The path of a script or the name of a module, as the user wrote it."""
    path: str = ""
    """The absolute path of the script; empty for a module, which Python imports by name."""
    arguments: tuple[str, ...] = ()
    keeps_variables: bool = False
    """True if later cells see the script's variables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSpec:
    """A cell, or a script, to run on a rank."""

    source: str
    execution_count: int
    """The ``n`` of the notebook's ``In [n]``.  Tracebacks on the ranks show this number."""
    run_id: str = ""
    """The id of the run to which ``ddpnb.log`` in this cell adds numbers; may be empty."""
    script: Script | None = None
    """The script from which ``source`` was read; None if ``source`` is a cell."""
    debug_rank: int | None = None
    """The only rank that may prompt the user with ``breakpoint()`` or ``input()``; may be None."""
    is_traced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A question from ``input()`` or the debugger on a rank.  The rank waits for the answer."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception that ended a cell or a run on one rank."""

    rank: int
    name: str
    text: str
    traceback: tuple[str, ...] = ()
    """The lines of the traceback that IPython on the rank shows."""
    failed_at: float
    """The ``time.time()`` on the rank when ddpnb caught the exception."""
    line: int = 0
    """The line of the cell or script that failed; 0 if the exception has no such line."""
    is_consequence: bool = False
    """True if the rank failed only because another rank failed and closed a connection."""
    was_waiting: bool = True
    """True if the rank waited for other ranks.  Used only if ``is_consequence`` is True."""
    is_death: bool = False
    """True if the rank's process died; ``text`` then describes the death."""
    breaks_group: bool = False
    """True if the ranks' next collectives would not match, so the group must be formed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReport:
    """The result of a cell on one rank."""

    failure: Failure | None = None
    num_collectives: int = 0
    """The number of collectives of the default group that had begun when the cell ended."""
    trace: RankSpans | None = None
    is_silent: bool = False
    """True if the cell printed nothing, so that no message marks the end of the cell's output."""


REMEDIES = {
    "DistributedDataParallel": "wrap the model again: DistributedDataParallel({name}.module)",
    "FullyShardedDataParallel": "build the model again and wrap it",
    "FSDPModule": "build the model again and shard it",
    "ZeroRedundancyOptimizer": "create the optimizer again",
    "DeviceMesh": "create the mesh again with init_device_mesh",
    "ProcessGroup": "create the group again with dist.new_group",
}
"""Maps a torch class to the fix for its objects after their process group was aborted."""


class StaleVariable(NamedTuple):
    """A variable on a rank that belongs to an aborted process group."""

    name: str
    """The variable's name, or an expression such as ``"trainer.model"``."""
    kind: str

    def sentence(self, where: str = "") -> str:
        """Say that the variable is unusable, optionally on some ranks, and how to fix it."""
        remedy = REMEDIES[self.kind].format(name=self.name)
        return f"`{self.name}`{where} belongs to an aborted process group. To fix this, {remedy}."
