"""Shows one collective: tensors before and after, time and bytes.  Runs in the kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from ddpnb.protocol.costs import Algorithm, algorithm_of
from ddpnb.protocol.trace import (
    NUMBER_BYTES,
    REDUCING,
    ROOTED,
    Chunks,
    CollectiveShown,
    CollectiveSpec,
)
from ddpnb.reports.formatting import NOTHING, counted, in_units, size
from ddpnb.reports.kit import (
    LEFT,
    MAX_DRAWN_RANKS,
    Look,
    Picture,
    Sheet,
    Shown,
    ink_on,
    rank_colour,
    write_label,
)
from ddpnb.reports.style import FONT_POINTS, MUTED, PAPER, SMALL_POINTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PACKET_BYTES = 1400
"""Number of bytes that certainly fit into one Ethernet packet."""
LATENCY_FACTOR = 2.0
"""A call is latency-bound if it takes at most this many times as long as the smallest tensor."""
REDUCED = "#f6e39a"
"""Background colour of results that are computed from the numbers of several ranks."""
BEFORE, AFTER, SENT, TIME = 1.5, 6.6, 11.3, 12.7
"""Positions of the four columns, in inches from the left edge of the picture."""
CELLS_WIDTH = 4.0
MAX_DRAWN_CHUNKS = 16
HEAD, RANK_HEIGHT, CELL_HEIGHT, LARGEST_CELL = 0.35, 0.5, 0.36, 0.52


@final
@dataclass(frozen=True, repr=False)
class CollectiveResult(Shown):
    """The effect of a collective on each rank.  It is shown as a picture and as text."""

    spec: CollectiveSpec
    shown: Sequence[CollectiveShown]
    """The results of the ranks that took part, in the order of the ranks."""

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that the backend uses for the collective."""
        found = algorithm_of(self.spec.name, self.shown[0].backend)
        assert found is not None
        return found

    @property
    def num_bytes(self) -> int:
        """B in the formulas: size of a rank's input, or of its output for ``scatter``, in bytes."""
        is_scatter = self.spec.name == "scatter"
        return NUMBER_BYTES * max(e.num_got if is_scatter else e.num_given for e in self.shown)

    def sent_by_formula(self, rank: int) -> float:
        """Return the number of bytes that a rank sends, computed with the formula."""
        ranks = self.spec.ranks
        root = self.spec.from_rank if self.spec.name in ROOTED else ranks[0]
        place = (ranks.index(rank) - ranks.index(root)) % len(ranks)
        return self.algorithm.of(self.num_bytes, len(ranks), place).sent

    def title(self) -> str:
        """Return the title: the call, the number of ranks, and the size of a rank's tensor."""
        spec = self.spec
        options = [f"op={spec.op}"] if spec.name in REDUCING else []
        options += [f"root={spec.from_rank}"] if spec.name in ROOTED else []
        given = size(self.num_bytes) if self.num_bytes else "nothing"
        ranks = counted(len(spec.ranks), "rank")
        return f"{spec.name}({', '.join(options)}) on {ranks}, B = {given}"

    def notes(self) -> list[str]:
        """Return the sentences below the picture: first the formula, then the measurements."""
        num, algorithm, backend = len(self.spec.ranks), self.algorithm, self.shown[0].backend
        if num == 1:
            return ["There is only one rank, so no bytes are sent."]
        by_formula = [self.sent_by_formula(rank) for rank in self.spec.ranks]
        amounts = dict.fromkeys((size(min(by_formula)), size(max(by_formula))))
        seconds = max(each.seconds for each in self.shown)
        measured = f"{in_units(seconds)} (median of 7 calls on the slowest rank)"
        counts = [each.num_bytes_sent for each in self.shown]
        if known := [each for each in counts if each is not None]:
            extra = max(sum(known) - sum(by_formula), 0)
            measured += f".  All ranks sent {size(sum(known))}, including {size(extra)} of headers"
        else:
            measured += ".  The bytes are computed, because nothing counted them"
        small = max(each.small_seconds for each in self.shown)
        is_quick = self.num_bytes <= PACKET_BYTES or seconds <= LATENCY_FACTOR * small
        return [
            f"{backend}{', if it chooses a ring' if backend == 'nccl' else ''}: {algorithm.name}.  "
            f"A rank sends {' to '.join(amounts)} ({algorithm.sent}).  "
            f"The messages need {counted(round(algorithm.of(0, num).num_rounds), 'round')} "
            f"({algorithm.rounds}), one after another.",
            f"Measured time: {measured}.",
            f"{'Latency' if is_quick else 'Bandwidth'}-bound at this size. For comparison, the "
            f"smallest possible tensor takes {in_units(small)}.",
        ]

    def pictures(self) -> list[Picture]:
        """Return a list that contains the picture."""
        return [Picture(draw_collective(self), self.title())]

    def text(self) -> str:
        """Return the title, a line for each rank, and the notes."""
        lines = [self.title()]
        for each in self.shown:
            sent = size(self.sent_by_formula(each.rank))
            numbers = f"{_listed(each.before)} -> {_listed(each.after)}"
            lines.append(f"rank {each.rank}: {numbers}; sends {sent}; {in_units(each.seconds)}")
        return "\n".join([*lines, *self.notes()])


def _listed(chunks: Chunks) -> str:
    return f"[{' | '.join(' '.join(f'{value:g}' for value in chunk) for chunk in chunks)}]"


def draw_collective(result: CollectiveResult) -> "Figure":
    """Return a figure with a row for each of the first 16 ranks."""
    shown = result.shown[:MAX_DRAWN_RANKS]
    rest = len(result.shown) - len(shown)
    title = result.title() + (f"; {rest} ranks are not drawn" if rest else "")
    height = HEAD + RANK_HEIGHT * len(shown)
    sheet = Sheet(title, height + 0.2, result.notes())
    axes = sheet.axes(height, left=0, right=0)
    axes.set(xlim=(0, sheet.width), ylim=(height, 0))
    axes.axis("off")
    for x, text in ((BEFORE, "before"), (AFTER, "after"), (SENT, "sends"), (TIME, "time")):
        write_label(axes, x, HEAD - 0.3, text, colour=MUTED)
    tensors = [chunks[:MAX_DRAWN_CHUNKS] for each in shown for chunks in (each.before, each.after)]
    widest = max(sum(map(len, each)) + 0.2 * len(each) for each in tensors)
    width = min(LARGEST_CELL, CELLS_WIDTH / max(widest, 1))
    is_reduced = result.spec.name in REDUCING
    for row, each in enumerate(shown):
        middle = HEAD + RANK_HEIGHT * (row + 0.5)
        axes.bar(LEFT, 0.18, 0.18, middle - 0.09, align="edge", color=rank_colour(each.rank))
        write_label(axes, LEFT + 0.26, middle, f"rank {each.rank}", points=FONT_POINTS)
        _draw_cells(axes, BEFORE, middle, width, each.before, each.num_given)
        arrow = {"arrowstyle": "->", "color": MUTED, "linewidth": 1.2}
        axes.annotate("", (AFTER - 0.15, middle), (AFTER - 0.6, middle), arrowprops=arrow)
        colour = REDUCED if is_reduced else ""
        _draw_cells(axes, AFTER, middle, width, each.after, each.num_got, colour)
        write_label(axes, SENT, middle, size(result.sent_by_formula(each.rank)))
        write_label(axes, TIME, middle, in_units(each.seconds))
    return sheet.figure


def _draw_cells(
    axes: "Axes",
    x: float,
    middle: float,
    width: float,
    chunks: Chunks,
    num_numbers: int,
    colour: str = "",
) -> None:
    """Draw a tensor's first numbers.  By default, a number's colour shows its source rank."""
    if not chunks:
        write_label(axes, x, middle, NOTHING, colour=MUTED)
        return
    drawn = chunks[:MAX_DRAWN_CHUNKS]
    look: Look = {"align": "edge", "edgecolor": PAPER, "linewidth": 1.0}
    for chunk in drawn:
        for value in chunk:
            ground = colour or rank_colour(int(value // 10) - 1)
            axes.bar(x, CELL_HEIGHT, width, middle - CELL_HEIGHT / 2, color=ground, **look)
            text = f"{value:g}" if abs(value) < 1e5 else f"{value:.0e}".replace("e+0", "e")
            points = min(SMALL_POINTS - 1, width * 72 / (0.66 * max(len(text), 2)))
            style: Look = {"points": points, "colour": ink_on(ground), "ha": "center"}
            write_label(axes, x + width / 2, middle + 0.01, text, **style)
            x += width
        x += 0.2 * width
    if num_numbers > sum(map(len, drawn)):
        write_label(axes, x, middle, "…", points=FONT_POINTS, colour=MUTED)
