"""The figure of a comparison, drawn from a snapshot of live or stored runs.  Runs in the kernel."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from ddpnb.reports import kit
from ddpnb.reports.figures.axes import Drawn, shortened
from ddpnb.reports.figures.curves import CurvePanel, draw_curves, held_out, losses
from ddpnb.reports.figures.rows import (
    MEMORY,
    RANKS,
    RATE,
    SPLIT,
    STALENESS,
    FigureColumn,
    draw_column,
    draw_name,
)
from ddpnb.reports.formatting import styles, title
from ddpnb.reports.kit import Sheet
from ddpnb.reports.style import EVERYTHING, PlotOptions, style_of
from ddpnb.results.comparison import Comparison
from ddpnb.results.frames import Row

FIGURE_WIDTH = 13.6
"""Width in inches.  Small text is then at least 10 pixels high on a 1280-pixel screen."""
FIGURE_TOP = 0.8
"""Height of the figure's title plus the first panels' titles.  All sizes are in inches."""
MARGIN, ROWS_HEAD = 0.17, 0.34
"""Margin around the figure, and height of the titles of the second row of columns."""
PANEL_HEIGHT, PANELS_GAP = 1.95, 0.78
"""Height of a panel, and height of the gap between two panels (with ticks and a title)."""
LABEL_HEIGHT, LEAST_LABEL_WIDTH = 0.225, 0.74
"""Height and minimum width of a label at the end of a line."""
CHARACTER, BOLD = 0.1, 1.12
"""Approximate width of a character in a label, and the factor by which bold text is wider."""
TICKS_WIDTH = 0.56
"""Width of the numbers on the y axis, at the left of each panel."""
ROWS_BOTTOM = 0.86
"""Height of the ticks and the legend that are below the rows."""
VALUE_HEIGHT = 0.26
NAMES_LEFT, NAMES_RIGHT, ROW_GAP = 0.4, 0.4, 0.3
"""Space left of the strategies' markers, space right of their names, space between columns."""
MOST_COLUMNS, MOST_HELD_OUT = 4, 3
X_AXES = {"samples": "samples", "seconds": "time, s"}
"""Maps each quantity on an x axis to its name in the titles of panels."""


def draw(
    comparison: Comparison,
    strategies: Sequence[Row],
    options: PlotOptions = EVERYTHING,
    *,
    is_live: bool = False,
) -> Figure:
    """Return a matplotlib figure of a comparison: curves above, a row per strategy below.

    Args:
        comparison: a snapshot of the comparison, with the runs' curves.
        strategies: the rows of ``strategies_frame``.
        options: the options of ``%ddp_plot``.
        is_live: True while the comparison runs.  The figure then has space for later results.
    """
    begun = [
        Drawn(style=style, row=row, runs=runs)
        for style, row in zip(styles(comparison, strategies), strategies, strict=True)
        for key in [(row["comparison"], row["strategy"])]
        for runs in [[run for run in comparison.runs if (run.comparison, run.name) == key]]
    ]
    bands = _panels(comparison, begun, options, is_live=is_live)
    columns = _columns(comparison, begun, options, is_live=is_live)
    names = [(each.row["label"], each.style) for each in begun]
    done = {each.row["strategy"] for each in begun}
    to_come = [name for name in comparison.strategies if name not in done]
    names += [(name, style_of(name, comparison.strategies)) for name in to_come]
    num = len(names)
    texts = [shortened(text) for text, _ in names]
    curve_height = max(PANEL_HEIGHT, LABEL_HEIGHT * (num + 1))
    row_height = max(num, 2) * VALUE_HEIGHT
    height = FIGURE_TOP + len(bands) * (curve_height + PANELS_GAP)
    height += len(columns) * (row_height + ROWS_BOTTOM) + max(len(columns) - 1, 0) * ROWS_HEAD
    sheet = Sheet(title(comparison), height - kit.TOP - kit.FOOT, width=FIGURE_WIDTH)

    down = FIGURE_TOP - kit.TOP
    room = max(LEAST_LABEL_WIDTH, CHARACTER * max(map(len, texts), default=0))
    for panels in bands:
        whole = (FIGURE_WIDTH - 2 * MARGIN) / len(panels)
        for index, panel in enumerate(panels):
            left = MARGIN + index * whole + TICKS_WIDTH
            right = FIGURE_WIDTH - MARGIN - (index + 1) * whole + 0.3 + room
            draw_curves(sheet.axes(curve_height, down=down, left=left, right=right), panel)
        down += curve_height + PANELS_GAP
    room *= BOLD
    for kinds in columns:
        for index, (name, style) in enumerate(names):
            up = height - kit.TOP - down - row_height * (index + 0.5) / num
            is_begun = index < len(begun)
            draw_name(sheet.figure, name, style, (NAMES_LEFT, up), is_begun=is_begun)
        left = NAMES_LEFT + NAMES_RIGHT + room
        texts_width = sum(kind.text_inches + ROW_GAP for kind in kinds) - ROW_GAP
        free = FIGURE_WIDTH - 2 * MARGIN - left - texts_width
        for kind in kinds:
            width = free * kind.share / sum(each.share for each in kinds)
            axes = sheet.axes(row_height, down=down, left=left, right=FIGURE_WIDTH - left - width)
            draw_column(axes, kind, begun, num)
            left += width + kind.text_inches + ROW_GAP
        down += row_height + ROWS_BOTTOM + ROWS_HEAD
    return sheet.figure


def _panels(
    comparison: Comparison,
    begun: Sequence[Drawn],
    options: PlotOptions,
    *,
    is_live: bool,
) -> list[list[CurvePanel]]:
    """Return the panels with curves.  Each inner list has the panels that are side by side.

    By default, a finished comparison shows the loss by samples and a held-out score by time.
    """
    target = options.target
    rivals = [each for each in begun if not each.row["is_ceiling"]]  # no-comm only shows speed
    loss_panels = [
        CurvePanel(
            title=f"Training loss by {called}",
            lines=[(each, losses(each.runs, x)) for each in rivals],
            x=x,
            log=options.log,
            target=target.value if target and not target.is_accuracy else None,
        )
        for x, called in X_AXES.items()
    ]
    is_all = options.panels == "all"
    marks_loss = target is not None and not target.is_accuracy
    if not is_all and (is_live or marks_loss):
        return [loss_panels]
    scores = [
        CurvePanel(
            title=f"Held-out {y} by {called}",
            lines=[(each, line) for each, line in lines if len(line.y)],
            x=x,
            log=options.log and y == "loss",
            target=target.value if target and target.is_accuracy and y == "accuracy" else None,
            is_share=y == "accuracy",
        )
        for y in ("accuracy", "loss")
        for x, called in X_AXES.items()
        for lines in [[(each, held_out(each.runs, x, y)) for each in begun]]
    ]
    scores = [panel for panel in scores if panel.lines]
    if not is_all:
        return [[loss_panels[0], scores[1]] if scores else loss_panels]
    return [loss_panels, *([scores[:MOST_HELD_OUT]] if scores else [])]


def _columns(
    comparison: Comparison, begun: Sequence[Drawn], options: PlotOptions, *, is_live: bool
) -> list[list[FigureColumn]]:
    """Return the columns.  Each inner list has the columns that are side by side.

    The columns for ranks, memory and staleness are included only if they are informative.  There
    are no columns for a hand-written loop that only logs losses.
    """
    is_split = any(each.row["step_seconds"] > 0 for each in begun)
    if not comparison.specs and not is_split:
        return []
    first = [RATE, SPLIT] if is_live or is_split else [RATE]
    others = (RANKS, MEMORY, STALENESS)
    if options.panels == "all":
        rest = [column for column in others if any(map(column.reach, begun))]
        return [first, rest] if rest else [first]
    return [[*first, *(column for column in others if column.says(begun))][:MOST_COLUMNS]]
