"""What keeps the ranks busy in the background, and what must wait for it?  (Notebook side.)"""

from ddpnb.errors import UserError
from ddpnb.notebook.background import RunningComparison
from ddpnb.notebook.cells import RunningCell
from ddpnb.notebook.left import LeftCell
from ddpnb.notebook.ranks import format_ranks, spoken_ranks
from ddpnb.notebook.status import Running


class Jobs:
    """Cells and the comparison that run while the notebook goes on."""

    def __init__(self) -> None:
        self._cells: list[RunningCell | LeftCell] = []
        self._comparison: RunningComparison | None = None

    @property
    def comparison(self) -> RunningComparison | None:
        """The comparison that trains, if one does."""
        running = self._comparison
        return None if running is None or running.done else running

    @property
    def running(self) -> list[Running]:
        """All that was started and may not have ended."""
        comparison = self.comparison
        return [*self._cells] if comparison is None else [*self._cells, comparison]

    def add(self, cell: RunningCell | LeftCell) -> None:
        """Keep an eye on a cell; those that have ended are forgotten."""
        self._cells = [other for other in self._cells if not other.done] + [cell]

    def begin(self, comparison: RunningComparison) -> None:
        """Train a comparison from now on."""
        self._comparison = comparison
        comparison.begin()

    def notes(self) -> list[str]:
        """Say how far the comparison is, if one trains."""
        if (comparison := self.comparison) is None:
            return []
        return [f"a comparison trains: {comparison.progress() or 'it is being checked'}"]

    def interrupt(self) -> str:
        """Stop the comparison, or where none trains, the cells; say in a sentence what."""
        if (comparison := self.comparison) is not None:
            comparison.interrupt()
            which = f" {comparison.name}" if comparison.name else ""
            return f"Interrupted the comparison{which}; what it has trained is kept."
        busy = [cell for cell in self._cells if not cell.done]
        for cell in busy:
            cell.interrupt()
        if not busy:
            return "Nothing runs in the background."
        where = " and ".join(spoken_ranks(cell.ranks) for cell in busy)
        return f"Interrupted the cell{'s' if len(busy) > 1 else ''} on {where}."

    def stop(self) -> None:
        """Stop the comparison and wait for that; forget the cells, which end with the ranks."""
        if (comparison := self.comparison) is not None:
            comparison.stop()
        self._cells.clear()

    def refuse_if_training(self) -> None:
        """Raise a UserError where a comparison trains."""
        if self.comparison is not None:
            raise UserError(
                "A comparison trains on the ranks: %ddp_interrupt stops it, "
                "%ddp_status tells how far it is."
            )

    def refuse_if_cells_run(self) -> None:
        """Raise a UserError where a cell runs."""
        if busy := [cell for cell in self._cells if not cell.done]:
            raise UserError(
                f"A cell still runs on rank {format_ranks(busy[0].ranks)}: wait for it, "
                "or stop it with %ddp_interrupt."
            )
