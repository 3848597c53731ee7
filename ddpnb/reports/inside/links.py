"""Latency and bandwidth between each pair of ranks, as a matrix: text, HTML, picture (kernel)."""

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from ddpnb.protocol.messages import RankState
from ddpnb.reports.formatting import counted
from ddpnb.reports.style import FONT_POINTS, INK, MUTED, PAPER, SMALL_POINTS
from ddpnb.reports.table import Cell, Column, Table, table_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Pair = tuple[int, int]
"""From a rank to another."""
SHADES = "YlGnBu"
CELL_INCHES = 0.72
DPI = 110


@final
class LinkMatrix:
    """What was measured between ranks; a notebook shows it, and keeps it when it is saved.

    Args:
        latencies: seconds one way, half of a round trip of one byte.
        rates: bytes per second in one direction, of a large message.
        states: of all ranks.
        seconds: how long measuring took.
    """

    def __init__(
        self,
        latencies: Mapping[Pair, float],
        rates: Mapping[Pair, float],
        states: Sequence[RankState],
        seconds: float,
    ) -> None:
        self.latencies = dict(latencies)
        self.rates = dict(rates)
        self._hosts = {state.rank: state.host for state in states}
        self.ranks = sorted({rank for pair in self.latencies for rank in pair})
        self.seconds = seconds

    def table(self) -> Table:
        """Return one row per sending rank, one column per receiving rank."""
        left = len(self._hosts) - len(self.ranks)
        notes = [
            "latency one way, half of a round trip of one byte; below it the rate of one "
            "message from the row's rank to the column's, while no other pair sends",
            f"measured in {self.seconds:.1f} s by send and recv of the process group",
        ]
        if left:
            notes.append(f"{counted(left, 'more rank')} not measured")
        return Table(
            caption="Between ranks: latency, and rate from row to column",
            columns=(
                Column(title="from"),
                *(Column(title=f"to {rank}", is_number=True) for rank in self.ranks),
            ),
            rows=tuple(
                table_row(
                    Cell(text=f"{one}", quiet=self._hosts[one]),
                    *(self._cell((one, other)) for other in self.ranks),
                )
                for one in self.ranks
            ),
            notes=tuple(notes),
        )

    def plot(self) -> "Figure":
        """Return the two matrices as a figure."""
        from matplotlib.figure import Figure  # noqa: PLC0415  0.3 s

        side = CELL_INCHES * max(3, len(self.ranks))
        figure = Figure(figsize=(2 * side + 3.4, side + 1.5), facecolor=PAPER)
        left, right = figure.subplots(1, 2)
        self._draw(left, "latency one way, µs", self.latencies, lambda s: _digits(1e6 * s))
        self._draw(right, "rate, MB/s", self.rates, lambda r: _digits(r / 1e6))
        figure.subplots_adjust(left=1.4 / (2 * side + 3.4), right=0.98, wspace=0.45, top=0.86)
        return figure

    def png(self) -> bytes:
        """Return the picture."""
        buffer = io.BytesIO()
        self.plot().savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()

    def __repr__(self) -> str:
        return self.table().text()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Return picture and table together, and each alone as a fallback."""
        png = self.png()
        image = f'<img alt="" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        return {
            "text/plain": repr(self),
            "text/html": image + self.table().html(),
            "image/png": png,
        }

    def _cell(self, pair: Pair) -> Cell | str:
        if pair not in self.latencies:
            return "–"
        return Cell(text=_latency(self.latencies[pair]), quiet=_rate(self.rates[pair]))

    def _draw(
        self,
        axes: "Axes",
        title: str,
        values: Mapping[Pair, float],
        spelled: Callable[[float], str],
    ) -> None:
        """Draw a matrix: the darker, the more; a line parts the hosts."""
        logs = {pair: math.log10(max(value, 1e-12)) for pair, value in values.items()}
        low, high = min(logs.values()), max(logs.values())
        span = max(high - low, 0.5)
        num = len(self.ranks)
        grid = [
            [(logs.get((one, other), math.nan) - low) / span for other in self.ranks]
            for one in self.ranks
        ]
        axes.imshow(grid, cmap=SHADES, vmin=-0.1, vmax=1.5)
        for row, one in enumerate(self.ranks):
            for column, other in enumerate(self.ranks):
                text = spelled(values[one, other]) if (one, other) in values else "–"
                axes.text(column, row, text, ha="center", va="center", color=INK, size=SMALL_POINTS)
        labels = [f"{rank}  {self._hosts[rank]}"[:14] for rank in self.ranks]
        axes.set_yticks(range(num), labels, color=MUTED, size=SMALL_POINTS)
        axes.set_xticks(range(num), [str(rank) for rank in self.ranks], color=MUTED)
        axes.set_xlabel("to rank", color=MUTED, size=SMALL_POINTS)
        axes.set_title(title, color=INK, size=FONT_POINTS)
        axes.tick_params(length=0)
        for position, rank in enumerate(self.ranks[:-1]):
            if self._hosts[rank] != self._hosts[self.ranks[position + 1]]:
                axes.axhline(position + 0.5, color=INK, lw=1)
                axes.axvline(position + 0.5, color=INK, lw=1)
        for spine in axes.spines.values():
            spine.set_visible(False)


def _latency(seconds: float) -> str:
    return f"{_digits(1e6 * seconds)} µs" if seconds < 1e-3 else f"{_digits(1e3 * seconds)} ms"


def _rate(bytes_per_second: float) -> str:
    if bytes_per_second < 1e9:
        return f"{_digits(bytes_per_second / 1e6)} MB/s"
    return f"{_digits(bytes_per_second / 1e9)} GB/s"


def _digits(value: float) -> str:
    """Return three digits of a number, never as a power of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
