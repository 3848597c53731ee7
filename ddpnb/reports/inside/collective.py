"""One collective as it ran: each rank's tensor before and after, time, bytes, formula (kernel)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from ddpnb.protocol.costs import Algorithm, algorithm_of
from ddpnb.protocol.trace import REDUCING, ROOTED, CollectiveShown, CollectiveSpec, Span
from ddpnb.reports.formatting import counted, size
from ddpnb.reports.inside.spans import MAX_RANKS, in_units
from ddpnb.reports.inside.traces import with_picture
from ddpnb.reports.style import FONT_POINTS, INK, SMALL_POINTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ddpnb.reports.inside.timeline import Shades

NUMBER_BYTES = 4
PACKET_BYTES = 1400
"""What one packet of Ethernet holds."""
LATENCY_FACTOR = 2.0
"""A call that takes at most so many times as long as one of a few numbers is latency-bound."""
RANK_COLOURS = (
    "#7fb2d9",
    "#e9a15b",
    "#8cc084",
    "#d98b9f",
    "#b39ad1",
    "#c9b45f",
    "#7cc4bf",
    "#b8937a",
)
"""Of the numbers that come from a rank; from the ninth rank on they repeat, darker."""
REDUCED = "#f0cf65"
"""Of numbers made from all ranks'."""
LEFT, BEFORE, AFTER, SENT, FORMULA, TIME = 0.3, 1.35, 6.25, 10.75, 11.95, 12.95
"""Inches from the left: the names of the ranks, the tensors, the columns of numbers."""
CELLS_WIDTH = 4.3
MAX_CHUNKS = 16
ROW_HEIGHT, CELL_HEIGHT, LARGEST_CELL = 0.5, 0.36, 0.52
GAP = 0.1
"""Inches between two chunks."""
HEAD, FOOT = 1.25, 0.42


ON_NCCL = (
    "NCCL chooses between rings and trees by size; the formula is the ring's.  Bytes on NVLink and "
    "PCIe are not counted."
)


def all_sent(span: Span) -> float:
    """Return how many bytes all ranks together send for a call, divided by the ranks that make it.

    So the sum over all spans of a trace is what was sent by gloo's formulas, without its headers.
    """
    if span.name == "send":
        return float(span.num_bytes or 0)
    algorithm = algorithm_of(span.name, "gloo")
    num = len(span.group)
    if algorithm is None or num < 2 or not span.num_bytes:
        return 0.0
    return sum(algorithm.bytes_sent(span.num_bytes, num, place) for place in range(num)) / num


@final
class CollectiveResult:
    """What a collective did on each rank, which a notebook shows as a picture and as a text."""

    def __init__(self, spec: CollectiveSpec, shown: Sequence[CollectiveShown]) -> None:
        self.spec = spec
        self.shown = tuple(shown)

    @property
    def algorithm(self) -> Algorithm:
        """How the backend carries it out."""
        found = algorithm_of(self.spec.name, self.shown[0].backend)
        assert found is not None
        return found

    @property
    def num_bytes(self) -> int:
        """B of the formulas: what a rank gives; for a scatter, what it gets."""
        is_scatter = self.spec.name == "scatter"
        return NUMBER_BYTES * max(e.num_got if is_scatter else e.num_given for e in self.shown)

    @property
    def seconds(self) -> float:
        """How long a call takes, on the slowest rank."""
        return max(each.seconds for each in self.shown)

    def sent_by_formula(self, rank: int) -> float:
        """Return the bytes that a rank sends by the formula."""
        ranks = self.spec.ranks
        root = self.spec.from_rank if self.spec.name in ROOTED else ranks[0]
        place = (ranks.index(rank) - ranks.index(root)) % len(ranks)
        return self.algorithm.bytes_sent(self.num_bytes, len(ranks), place)

    def plot(self, *, dark: bool = False) -> "Figure":
        """Return the picture as a matplotlib figure."""
        return draw_collective(self, dark=dark)

    def text(self) -> str:
        """Return the same in words."""
        lines = [title_of(self)]
        for each in self.shown:
            before, after = _listed(each.before), _listed(each.after)
            sent = "not counted" if each.num_bytes_sent is None else size(each.num_bytes_sent)
            lines.append(
                f"rank {each.rank}: {before} -> {after}; sent {sent}, by the formula "
                f"{size(self.sent_by_formula(each.rank))}; {in_units(each.seconds)}"
            )
        return "\n".join([*lines, *notes_of(self)])

    def __repr__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Return the picture with the text below it, and each alone as a fallback."""
        return with_picture(self.plot(), title_of(self), self.text())


def title_of(result: CollectiveResult) -> str:
    """Return the title: what was called, by how many ranks, with how much."""
    spec = result.spec
    options = [f"op={spec.op}"] if spec.name in REDUCING else []
    if spec.name in ROOTED:
        options.append(f"root={spec.from_rank}")
    call = f"{spec.name}({', '.join(options)})"
    given = size(result.num_bytes) if result.num_bytes else "nothing"
    return f"{call} on {counted(len(spec.ranks), 'rank')}, B = {given}"


def notes_of(result: CollectiveResult) -> list[str]:
    """Return the sentences below the picture: the formula, then what was measured."""
    num, algorithm, first = len(result.spec.ranks), result.algorithm, result.shown[0]
    by_formula = [result.sent_by_formula(rank) for rank in result.spec.ranks]
    least, most = size(min(by_formula)), size(max(by_formula))
    amount = most if least == most else f"{least} to {most}"
    notes = [
        f"{first.backend}: {algorithm.name}.  Formula of the bytes that a rank sends: "
        f"{algorithm.sent or algorithm.num_bytes}; with N = {num}: {amount}.  Messages that follow "
        f"one another on the busiest link: {algorithm.messages}; here "
        f"{algorithm.cost(result.num_bytes, num).number:g}."
    ]
    counts = [each.num_bytes_sent for each in result.shown]
    known = [each for each in counts if each is not None]
    time = f"{in_units(result.seconds)}, the slowest rank's median of 7 calls"
    if known and num > 1:
        extra = sum(known) - sum(by_formula)
        time += (
            f"; {size(sum(known))} on all ranks' sockets, {size(max(extra, 0))} of it "
            "gloo's headers and handshakes"
        )
    notes.append(f"Measured: {time}.")
    small = max(each.small_seconds for each in result.shown)
    if num > 1:
        notes.append(_bound(result.num_bytes, result.seconds, small))
    else:
        notes.append("There is one rank: nothing is sent.")
    if first.backend == "nccl":
        notes.append(ON_NCCL)
    if len(result.shown) > MAX_RANKS:
        notes.append(f"And {counted(len(result.shown) - MAX_RANKS, 'more rank')}, not drawn.")
    return notes


def _bound(num_bytes: int, seconds: float, small: float) -> str:
    """Return whether it is the latency that a call costs, or its bytes."""
    if num_bytes <= PACKET_BYTES:
        return "Latency-bound at this size: a tensor fits into one packet of a network."
    few = f"with as few numbers as there can be it takes {in_units(small)}"
    if seconds <= LATENCY_FACTOR * small:
        return f"Latency-bound at this size: {few}."
    share = 1 - small / seconds
    return f"Bandwidth-bound at this size: {few}; {100 * share:.0f} % of the time is for the bytes."


def _listed(chunks: Sequence[Sequence[float]]) -> str:
    parts = [" ".join(f"{value:g}" for value in chunk) for chunk in chunks]
    return f"[{' | '.join(parts)}]" if parts else "[]"


# -- the picture ---------------------------------------------------------------------------


def draw_collective(result: CollectiveResult, *, dark: bool = False) -> "Figure":
    """Return a figure with a row for each rank: before, after, bytes, time."""
    from ddpnb.reports.inside import timeline  # noqa: PLC0415  matplotlib: 0.3 s

    look = timeline.shades(dark)
    shown = result.shown[:MAX_RANKS]
    notes = [line for note in notes_of(result) for line in timeline.wrapped(note)]
    height = HEAD + ROW_HEIGHT * len(shown) + FOOT + timeline.NOTE_HEIGHT * len(notes)
    figure = timeline.sheet(height, title_of(result), look)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, timeline.WIDTH)
    axes.set_ylim(height, 0)
    axes.axis("off")
    heads = {BEFORE: "before", AFTER: "after", SENT: "counted", FORMULA: "formula", TIME: "time"}
    for x, text in heads.items():
        axes.text(x, HEAD - 0.22, text, fontsize=SMALL_POINTS, color=look.muted, va="center")
    widest = max((_num_cells(c) for each in shown for c in (each.before, each.after)), default=1)
    for row, each in enumerate(shown):
        middle = HEAD + ROW_HEIGHT * (row + 0.5)
        colour = colour_of_rank(each.rank)
        axes.bar(LEFT, 0.18, 0.18, middle - 0.09, align="edge", color=colour)
        name: dict[str, Any] = {"fontsize": FONT_POINTS, "color": look.ink, "va": "center"}
        axes.text(LEFT + 0.26, middle, f"rank {each.rank}", **name)
        _cells(axes, each.before, BEFORE, middle, widest, each.num_given, look)
        _cells(
            axes,
            each.after,
            AFTER,
            middle,
            widest,
            each.num_got,
            look,
            is_reduced=result.spec.name in REDUCING,
        )
        arrow = {"arrowstyle": "->", "color": look.muted, "linewidth": 1.2}
        axes.annotate(
            "", (AFTER - 0.12, middle), (BEFORE + CELLS_WIDTH + 0.18, middle), arrowprops=arrow
        )
        sent = "–" if each.num_bytes_sent is None else size(each.num_bytes_sent)
        by_formula = size(result.sent_by_formula(each.rank))
        for x, text in ((SENT, sent), (FORMULA, by_formula), (TIME, in_units(each.seconds))):
            axes.text(x, middle, text, fontsize=SMALL_POINTS, color=look.ink, va="center")
    for index, line in enumerate(notes):
        y = HEAD + ROW_HEIGHT * len(shown) + 0.22 + timeline.NOTE_HEIGHT * index
        axes.text(LEFT, y, line, fontsize=SMALL_POINTS - 1, color=look.muted, va="center")
    return figure


def colour_of_rank(rank: int) -> str:
    """Return the colour of the numbers that come from a rank."""
    colour = RANK_COLOURS[rank % len(RANK_COLOURS)]
    if rank // len(RANK_COLOURS) % 2 == 0:
        return colour
    return "#" + "".join(f"{round(int(colour[at : at + 2], 16) * 0.72):02x}" for at in (1, 3, 5))


def _num_cells(chunks: Sequence[Sequence[float]]) -> float:
    """Return the room that chunks take, in cells: a gap counts as a fifth of one."""
    shown = chunks[:MAX_CHUNKS]
    return sum(map(len, shown)) + 0.2 * max(0, len(shown) - 1)


def _cells(
    axes: Any,
    chunks: Sequence[Sequence[float]],
    left: float,
    middle: float,
    widest: float,
    num_numbers: int,
    look: "Shades",
    *,
    is_reduced: bool = False,
) -> None:
    """Draw a tensor's numbers as cells in the colours of the ranks that they come from."""
    if not chunks:
        axes.text(left, middle, "–", fontsize=SMALL_POINTS, color=look.muted, va="center")
        return
    width = min(LARGEST_CELL, (CELLS_WIDTH - 0.3) / max(widest, 1))
    x, places, colours = left, [], []
    for chunk in chunks[:MAX_CHUNKS]:
        for value in chunk:
            rank = int(value // 10) - 1
            colours.append(REDUCED if is_reduced else colour_of_rank(rank))
            places.append(x)
            text = f"{value:g}" if abs(value) < 1e5 else f"{value:.0e}".replace("e+0", "e")
            points = min(SMALL_POINTS - 1, width * 72 / (0.66 * max(len(text), 2)))
            options = {"fontsize": points, "color": INK, "ha": "center", "va": "center"}
            axes.text(x + width / 2, middle + 0.01, text, **options)
            x += width
        x += 0.2 * width
    axes.bar(
        places,
        CELL_HEIGHT,
        width,
        middle - CELL_HEIGHT / 2,
        color=colours,
        align="edge",
        edgecolor=look.paper,
        linewidth=1.0,
    )
    if num_numbers > len(places):
        axes.text(x - 0.1 * width, middle, "…", fontsize=FONT_POINTS, color=look.muted, va="center")
