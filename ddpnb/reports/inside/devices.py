"""What each device of DataParallel does and holds in a step, beside the ranks of DDP (kernel).

Pure functions of what the ranks have measured.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ddpnb.protocol.inspection import DataParallelReport, Device
from ddpnb.protocol.trace import Span, Trace
from ddpnb.reports.formatting import counted, number, percent, size
from ddpnb.reports.inside.buckets import DdpInspection
from ddpnb.reports.inside.spans import MAX_RANKS, bounds, in_units, timeline_text
from ddpnb.reports.inside.timeline import WIDTH, Shades, draw_timeline, shades, sheet, wrapped
from ddpnb.reports.style import FONT_POINTS, SMALL_POINTS
from ddpnb.reports.table import Column, Table, table_row

KINDS = {
    "parameters": "#5f7f9c",
    "gradients": "#d1495b",
    "buckets": "#e39aa4",
    "optimizer": "#c3c9a8",
    "batch": "#d9c7b8",
    "activations": "#9fb4c7",
    "outputs": "#edae49",
}
"""The colour of each kind of memory."""
BAR, TOP, BOTTOM = 0.34, 1.35, 0.75
HELD = (
    "Bytes of tensors at their most: parameters and buffers, gradients, DDP's buckets, optimizer, "
    "samples, what the forward pass keeps for the backward pass, outputs."
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelInspection:
    """A step of DataParallel and one of DDP, of the same task."""

    title: str
    report: DataParallelReport
    ddp: DdpInspection
    ddp_held: tuple[Mapping[str, int], ...]
    """Bytes by kind, of each rank."""
    ddp_samples: tuple[int, ...]

    @property
    def chunks(self) -> str:
        """How the batch is cut: ``"30 -> 10, 10, 10"``."""
        parts = [str(each.num_samples) for each in self.report.devices if each.num_samples]
        return f"{self.report.num_samples} -> {', '.join(parts)}"

    def trace(self) -> Trace:
        """Return the median step; its ranks are devices."""
        devices = self.report.devices
        return Trace(
            title=f"One step of DataParallel (emulated), {self.title}: batch {self.chunks}",
            num_ranks=len(devices),
            spans=tuple(span for each in devices for span in each.spans),
            notes=(
                f"The median of {counted(self.report.num_steps, 'step')}; device 0 sends and "
                "receives for all, so the others have nothing to do meanwhile.",
            ),
        )

    def table(self) -> Table:
        """Return a row for each device and each rank, with what they show as notes."""
        titles = ["", "samples", "computes", "exchanges", "holds"]
        rows = []
        for each in self.report.devices:
            compute, exchange = busy(each.spans)
            cells = [str(each.num_samples), f"[{in_units(compute)}]", f"[{in_units(exchange)}]"]
            rows.append(table_row(f"dp {each.name}", *cells, size(sum(each.held.values()))))
        spans = self.ddp.trace().spans
        for rank, held in enumerate(self.ddp_held):
            compute, exchange = busy([span for span in spans if span.rank == rank])
            cells = [str(self.ddp_samples[rank]), in_units(compute), in_units(exchange)]
            rows.append(table_row(f"ddp rank {rank}", *cells, size(sum(held.values()))))
        return Table(
            caption=f"{self.title}: DataParallel beside DDP",
            columns=tuple(Column(title=each, is_number=at > 0) for at, each in enumerate(titles)),
            rows=tuple(rows),
            notes=tuple(self.words()),
        )

    def words(self) -> list[str]:
        """Return what the devices show, one sentence or two each."""
        begin, end = bounds(self.trace().spans)
        totals = [sum(each.held.values()) for each in self.report.devices]
        others = statistics.mean(totals[1:])
        length = end - begin
        shares = [sum(busy(each.spans)) / length for each in self.report.devices]
        by_rank = [sum(held.values()) for held in self.ddp_held]
        spread = max(by_rank) / max(min(by_rank), 1) - 1
        found = [
            f"The batch is cut into chunks, {self.chunks}.  In each step parameters go out, "
            "outputs are gathered and gradients are summed, all through device 0.",
            f"Device 0 holds {size(totals[0])}, {number(totals[0] / max(others, 1), 3)} times as "
            f"much as the others; ranks of DDP differ by {percent(spread, 1)}.  It alone "
            "holds the optimizer's state, the whole batch and all outputs.",
            f"Device 0 is busy in [{percent(shares[0])}] of the step, the others in "
            f"[{percent(statistics.mean(shares[1:]))}].",
            HELD,
            "DataParallel is emulated on the threads of one process, so its times stand in "
            "brackets: they show the order of things, not its speed.",
        ]
        if len(self.report.devices) > sum(each.num_samples > 0 for each in self.report.devices):
            found.append("The batch is too small for all devices: some have no chunk.")
        return found

    def figures(self, *, dark: bool = False) -> list[tuple[Figure, str]]:
        """Return the pictures, each with its text: DataParallel's step, DDP's, what each holds."""
        trace, other = self.trace(), self.ddp.trace()
        return [
            (_devices_named(draw_timeline(trace, dark=dark)), _named(timeline_text(trace))),
            (draw_timeline(other, dark=dark), timeline_text(other)),
            (draw_held(self, dark=dark), held_text(self)),
        ]

    def __repr__(self) -> str:
        texts = [_named(timeline_text(self.trace())), held_text(self), self.table().text()]
        return "\n\n".join(texts)


def busy(spans: Sequence[Span]) -> tuple[float, float]:
    """Return the seconds of computing, and of exchanging."""
    compute = sum(span.seconds for span in spans if span.lane == "compute")
    return compute, sum(span.seconds for span in spans if span.lane == "communication")


def held_text(inspection: DataParallelInspection) -> str:
    """Return what each device and rank holds, a line each."""
    lines = [f"{inspection.title}: bytes held in a step"]
    for name, held in _holders(inspection):
        parts = [f"{kind} {size(held[kind])}" for kind in KINDS if held.get(kind)]
        lines.append(f"{name}: {size(sum(held.values()))} ({', '.join(parts)})")
    return "\n".join(lines)


def draw_held(inspection: DataParallelInspection, *, dark: bool = False) -> Figure:
    """Return a bar of bytes for each device, and below for each rank of DDP, on one axis."""
    look, holders = shades(dark), _holders(inspection)
    shown = [pair for pair in holders if int(pair[0].split()[-1]) < MAX_RANKS]
    rest = len(holders) - len(shown)
    notes = wrapped(HELD) + ([f"And {rest} more, which are not drawn."] if rest else [])
    rows = len(shown) + 0.6
    height = TOP + BAR * rows + BOTTOM + 0.24 * len(notes)
    figure = sheet(height, f"{inspection.title}: what each device holds in a step", look)
    bottom = (BOTTOM + 0.24 * len(notes)) / height
    left = 1.7 / WIDTH
    axes: Any = figure.add_axes((left, bottom, 1 - left - 0.9 / WIDTH, BAR * rows / height))
    most = max((sum(held.values()) for _, held in holders), default=1)
    scale, unit = (1e-6, "MB") if most >= 1e6 else (1e-3, "kB")
    y = 0.0
    for index, (name, held) in enumerate(shown):
        if index and name.startswith("DDP") and not shown[index - 1][0].startswith("DDP"):
            y += 0.6
        _draw_bar(axes, y, held, scale, look)
        axes.text(
            -0.008, y + 0.5, name, transform=axes.get_yaxis_transform(), ha="right", va="center",
            fontsize=FONT_POINTS - 1, color=look.ink,
        )  # fmt: skip
        y += 1
    axes.set_ylim(y, 0)
    axes.set_xlim(0, most * scale * 1.09)
    axes.set_facecolor("none")
    axes.set_yticks([])
    axes.set_xlabel(unit, fontsize=SMALL_POINTS, color=look.muted)
    axes.tick_params(labelsize=SMALL_POINTS, labelcolor=look.muted, color=look.muted)
    axes.grid(axis="x", color=look.rule, linewidth=1.0)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    kinds = [kind for kind in KINDS if any(held.get(kind) for _, held in shown)]
    axes.legend(
        handles=[Patch(facecolor=KINDS[kind], label=kind) for kind in kinds],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=7,
        frameon=False,
        fontsize=SMALL_POINTS - 1,
        labelcolor=look.ink,
    )
    for index, line in enumerate(reversed(notes)):
        y_note = (0.32 + 0.24 * index) / height
        figure.text(0.3 / WIDTH, y_note, line, fontsize=SMALL_POINTS - 1, color=look.muted)
    return figure


def _draw_bar(axes: Any, y: float, held: Mapping[str, int], scale: float, look: Shades) -> None:
    at = 0.0
    for kind, colour in KINDS.items():
        width = held.get(kind, 0) * scale
        axes.add_patch(
            Rectangle((at, y + 0.12), width, 0.76, facecolor=colour, edgecolor=look.paper)
        )
        at += width
    total = size(sum(held.values()))
    style: dict[str, Any] = {"fontsize": SMALL_POINTS - 1, "color": look.ink}
    axes.text(at, y + 0.5, f"  {total}", va="center", **style)


def _holders(inspection: DataParallelInspection) -> list[tuple[str, Mapping[str, int]]]:
    devices: Sequence[Device] = inspection.report.devices
    return [(f"DP {each.name}", each.held) for each in devices] + [
        (f"DDP rank {rank}", held) for rank, held in enumerate(inspection.ddp_held)
    ]


def _devices_named(figure: Figure) -> Figure:
    """Call the rows of a time line devices."""
    for text in figure.axes[0].texts:
        if text.get_text().startswith("rank "):
            text.set(text=_named(text.get_text()), fontsize=FONT_POINTS - 2.5)
    return figure


def _named(text: str) -> str:
    return re.sub(r"\brank(s?)\b", r"device\1", text)
