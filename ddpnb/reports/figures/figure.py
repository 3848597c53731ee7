"""The figure of a comparison, drawn from a snapshot, live and from the store (kernel)."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from ddpnb.history.comparison import Comparison
from ddpnb.protocol.catalogue import BASELINE, CEILING, STRATEGIES
from ddpnb.reports import kit
from ddpnb.reports.figures.axes import planned_samples, planned_seconds
from ddpnb.reports.figures.curves import CurvePanel, draw_curves
from ddpnb.reports.figures.layout import (
    HEAD,
    PANELS_GAP,
    ROWS_BOTTOM,
    TOP,
    WIDTH,
    heights,
    panel_places,
    row_places,
    shortened,
    width_inches,
)
from ddpnb.reports.figures.rows import (
    MEMORY,
    RANKS,
    RATE,
    SPLIT,
    STALENESS,
    RowKind,
    draw_column,
    draw_name,
    is_uneven,
)
from ddpnb.reports.figures.series import Series, series_of
from ddpnb.reports.formatting import longest_label, title
from ddpnb.reports.kit import Sheet
from ddpnb.reports.style import EVERYTHING, PlotOptions, style_of

MOST_COLUMNS, MOST_HELD_OUT = 4, 3
BESIDE = (BASELINE, CEILING)
LEAST_LABEL_WIDTH = 0.74
"""Least inches for a label."""
LEAST_DIFFERENCE = 1.5
"""How many times as much memory is worth a column."""
X_WORDS = {"samples": "samples", "seconds": "time, s", "updates": "updates"}


def draw(
    comparison: Comparison,
    options: PlotOptions = EVERYTHING,
    *,
    is_live: bool = False,
    seconds: float = 0.0,
) -> Figure:
    """Return a comparison as a matplotlib figure: curves above, a row per strategy below.

    Args:
        comparison: at one moment.
        options: how it is drawn.
        is_live: whether it trains; then what may come has its place already.
        seconds: the end of the axis of time; 0: it is planned.
    """
    series = series_of(comparison, options.y, options.target)
    seconds = seconds or planned_seconds(comparison, 0.0)
    bands = _panels(comparison, series, options, seconds, is_live=is_live)
    columns = _columns(comparison, series, options, is_live=is_live)
    begun = {each.summary.name for each in series}
    to_come = [name for name in comparison.strategies if name not in begun]
    num_rows = len(series) + len(to_come)
    labels = [each.label for each in series] + list(map(longest_label, to_come))
    curve_height, row_height = heights(num_rows)
    height = TOP + len(bands) * (curve_height + PANELS_GAP)
    height += len(columns) * (row_height + ROWS_BOTTOM) + max(len(columns) - 1, 0) * HEAD
    sheet = Sheet(title(comparison), height - kit.TOP - kit.FOOT, width=WIDTH)

    down = TOP - kit.TOP
    for panels in bands:
        places = panel_places(len(panels), _room(labels, is_bold=False))
        for panel, (left, right) in zip(panels, places, strict=True):
            draw_curves(sheet.axes(curve_height, down=down, left=left, right=right), panel)
        down += curve_height + PANELS_GAP
    room = _room(labels, is_bold=True)
    names = [(each.label, each.style) for each in series]
    names += [(name, style_of(name, comparison.strategies)) for name in to_come]
    for kinds in columns:
        for index, (name, style) in enumerate(names):
            up = height - kit.TOP - down - row_height * (index + 0.5) / num_rows
            draw_name(sheet.figure, name, style, up, is_begun=index < len(series))
        places = row_places(room, [(kind.share, kind.text_inches) for kind in kinds])
        for kind, (left, right) in zip(kinds, places, strict=True):
            axes = sheet.axes(row_height, down=down, left=left, right=right)
            draw_column(axes, kind, series, num_rows, seconds)
        down += row_height + ROWS_BOTTOM + HEAD
    return sheet.figure


def _room(labels: Sequence[str], *, is_bold: bool) -> float:
    """Return inches for the widest label."""
    widths = [width_inches(shortened(label), is_bold=is_bold) for label in labels]
    return max([LEAST_LABEL_WIDTH, *widths])


# -- curves --------------------------------------------------------------------------------


def _panels(
    comparison: Comparison,
    series: Sequence[Series],
    options: PlotOptions,
    seconds: float,
    *,
    is_live: bool,
) -> list[list[CurvePanel]]:
    """Return the panels with curves, band by band.

    By default there are two: losses by samples, and at the end a held-out score by time.
    """
    ends = {"samples": planned_samples(comparison), "seconds": seconds, "updates": 0.0}
    target = options.target
    across = (options.x,) if options.x else ("samples", "seconds")
    losses = [
        CurvePanel(
            title=f"{options.y or 'Training loss'} by {X_WORDS[x]}",
            lines=[(each, each.losses[x]) for each in series],
            right=ends[x],
            is_of_time=x == "seconds",
            log=options.log,
            target=target.value if target and not target.is_accuracy and not options.y else None,
            awaited=options.y or "the first steps",
        )
        for x in across
    ]
    held_out = [
        CurvePanel(
            title=f"Held-out {y} by {X_WORDS[x]}",
            lines=[(each, each.held_out[y, x]) for each in series if len(each.held_out[y, x].y)],
            right=ends[x],
            is_of_time=x == "seconds",
            log=options.log and y == "loss",
            target=target.value if target and target.is_accuracy and y == "accuracy" else None,
            is_share=y == "accuracy",
        )
        for y in ("accuracy", "loss")
        for x in [x for x in across if x != "updates"] or ["samples"]
    ]
    held_out = [panel for panel in held_out if panel.lines]
    if options.panels != "all":
        marks_loss = target is not None and not target.is_accuracy
        is_shown = held_out and not is_live and not (options.y or marks_loss)
        return [[losses[0], held_out[len(across) - 1]] if is_shown else losses]
    rate = CurvePanel(
        title="Samples per second by time, s",
        lines=[(each, each.throughput) for each in series],
        right=seconds,
        is_of_time=True,
    )
    return [[*losses, rate], held_out[:MOST_HELD_OUT]] if held_out else [[*losses, rate]]


# -- rows ----------------------------------------------------------------------------------


def _columns(
    comparison: Comparison, series: Sequence[Series], options: PlotOptions, *, is_live: bool
) -> list[list[RowKind]]:
    """Return the columns of the rows, band by band; none of a loop that measures only losses.

    Speed and the time of a step always; of ranks, memory and staleness what says something.
    """
    is_split = any(each.summary.split.is_known for each in series)
    if not comparison.specs and not is_split:
        return []
    planned = [STRATEGIES.get(spec.strategy.partition(":")[0]) for spec in comparison.specs]
    may_be_stale = is_live and any(entry and entry.is_asynchronous for entry in planned)
    says = {
        RANKS.title: any(map(is_uneven, series)),
        MEMORY.title: memory_differs(series),
        STALENESS.title: may_be_stale or any(each.staleness[1:].any() for each in series),
    }
    first = [RATE, SPLIT] if is_live or is_split else [RATE]
    if options.panels == "all":
        rest = [kind for kind in (RANKS, MEMORY, STALENESS) if any(map(kind.reach, series))]
        return [first, rest] if rest else [first]
    return [[*first, *(k for k in (RANKS, MEMORY, STALENESS) if says[k.title])][:MOST_COLUMNS]]


def memory_differs(series: Sequence[Series]) -> bool:
    """Return whether a rank of one strategy holds much more than that of another.

    ``single``, whose batch is whole, and the ceiling are not looked at.
    """
    others = [s.summary for s in series if s.summary.name.partition(":")[0] not in BESIDE]
    totals = [each.memory.total for each in others if each.memory.total]
    return max(totals, default=0) > LEAST_DIFFERENCE * min(totals, default=0)
