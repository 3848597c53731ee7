"""A prediction of throughput, shown as a picture, a table and text.  Runs in the kernel."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from ddpnb.prediction.model import Point, point
from ddpnb.prediction.predict import Prediction
from ddpnb.reports.formatting import NOTHING, counted, in_units, percent, short, tick
from ddpnb.reports.kit import Look, Picture, Sheet, Shown, dress, write_label
from ddpnb.reports.style import INK, LINES, MUTED, PAPER, ink_of, style_of
from ddpnb.reports.table import Cell, Column, Table, table_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORECAST_WIDTH, HEIGHT, FORECAST_TICKS, NAMES = 10.0, 3.6, 0.5, 1.9
"""Width of the picture, height of the axes, height of the ticks, width of the names, in inches."""
LABEL_GAP = 0.062
"""Minimum distance between two names, as a share of the height of the axes."""
CELLS = "Each cell shows samples/s, the time of a step, and the efficiency compared with one rank."


@final
@dataclass(frozen=True, repr=False)
class PredictionResult(Shown):
    """A prediction.  It is shown as a picture and a table.  ``prediction`` contains the numbers."""

    prediction: Prediction

    def table(self) -> Table:
        """Return a table with one row per strategy, and one column per number of ranks."""
        ranks, rows = self.prediction.question.ranks, []
        for name, points in self.prediction.points.items():
            at = {each.num_ranks: each for each in points}
            head = Cell(text=name, dot=style_of(name, tuple(self.prediction.points)).colour)
            rows.append(table_row(head, *(_cell(at.get(n)) for n in ranks)))
        return Table(
            caption=self.sentence(),
            columns=(
                Column(title="strategy"),
                *(Column(title=counted(n, "rank"), is_number=True) for n in ranks),
            ),
            rows=tuple(rows),
            notes=(*(each(self.prediction) for each in (_computing, _between, _batches)), CELLS),
        )

    def sentence(self) -> str:
        """Return a sentence with the end of scaling and the bottleneck of each strategy."""
        parts = []
        for name, stop in self.prediction.stops.items():
            held = self.prediction.limits[name]
            if stop is None:
                parts.append(f"{name} scales to {self.prediction.searched:,} ranks or more")
            elif stop == 1:
                parts.append(f"{name} is hardly faster with a second rank (bottleneck: {held})")
            else:
                parts.append(f"{name} stops scaling at about {stop:,} ranks (bottleneck: {held})")
        return f"Predicted, not measured: {'; '.join(parts)}."

    def pictures(self) -> list[Picture]:
        """Return a list that contains the picture."""
        return [Picture(draw_prediction(self.prediction), self.sentence())]


def _cell(found: Point | None) -> Cell:
    if found is None:
        return Cell(text=NOTHING)
    quiet = f"{in_units(found.step_seconds)}, {percent(found.efficiency)}"
    return Cell(text=short(found.samples_per_second), quiet=quiet)


# -- the assumptions, in three notes -------------------------------------------------------


def _computing(prediction: Prediction) -> str:
    """Return a note that says how the computing time of a rank is predicted."""
    measured, work, machine = prediction.found.measured, prediction.work, prediction.machine
    sent = f"The model has {work.num_bytes / 1e6:.3g} MB of gradients."
    if prediction.question.step:
        passes = f", in {work.num_passes} micro-batches" if work.num_passes > 1 else ""
        return f"A step on one device takes {prediction.question.step}{passes} (--step). {sent}"
    if measured.devices is not None:
        return f"Computed for the devices of {measured.name}: {measured.devices.text}. {sent}"
    alone = work.alone
    line = (
        f"Fitted to {measured.name}: a step costs {1e3 * alone.fixed:.3g} ms plus "
        f"{1e6 * alone.per_sample:.3g} µs per sample on one rank. {sent}"
    )
    if measured.short:
        runs = ", ".join(measured.short)
        line += f" The fit is uncertain, because these runs took less than 4 s: {runs}."
    slower = work.together.per_sample / alone.per_sample - 1
    busiest = min(machine.on_host(max(prediction.question.ranks)), machine.cores_per_host)
    if slower > 0 and work.num_together < busiest < math.inf:
        line += (
            f" {work.num_together} ranks slow each other down by {percent(slower)}. The prediction "
            "assumes that this loss grows with the number of ranks, up to one rank per core."
        )
    return line


def _between(prediction: Prediction) -> str:
    """Return a note on the speed of the links between ranks and on the all-reduce algorithm."""
    measured, question = prediction.found.measured, prediction.question
    machine, link = prediction.machine, prediction.machine.link
    how = f"The all-reduce algorithm is {machine.algorithm}."
    if not question.link and measured.devices is None:
        cores = f"{measured.cores:g} cores, shared by all ranks"
        exchanges = f"The fitted speed of exchanges between ranks is {link.text}."
        has = cores if measured.shares_cores else "GPUs"
        return f"{measured.place[0].upper()}{measured.place[1:]} has {has}. {exchanges} {how}"
    line = "The link between any two ranks"
    if machine.inside is not None:
        hosts = f"Each host has {machine.ranks_per_host:g} ranks"
        line = f"{hosts}, connected by {machine.inside.text}. The link between hosts"
    line += f" is {question.link} ({link.text})" if question.link else f" is {link.text}"
    line += f". {how}"
    if question.link and not question.step and measured.devices is None:
        line += (
            f" Each device is as fast as one rank of {measured.place}. --step sets another speed."
        )
    return line


def _batches(prediction: Prediction) -> str:
    """Return a note that says how samples are shared, and how much the time of a step varies."""
    work = prediction.work
    if work.is_weak:
        line = f"Each rank has {work.batch_size:g} samples per step (weak scaling)."
    else:
        line = f"All ranks share a batch of {work.batch_size:g} samples (strong scaling)."
    if any(work.samples(num) < 1 for num in prediction.question.ranks):
        line += " There are no predictions for more ranks than samples."
    if not work.variation:
        return f"{line} All ranks take the same time for a step."
    vary = f"The time of a step varies by {percent(work.variation, 1)}"
    return f"{line} {vary}, and ranks wait for the slowest rank."


# -- the picture ---------------------------------------------------------------------------


def draw_prediction(prediction: Prediction) -> "Figure":
    """Return a figure of throughput by number of ranks, with logarithmic axes."""
    from ddpnb.reports.figures.curves import spread_out  # noqa: PLC0415  matplotlib: 0.3 s

    names, found = tuple(prediction.points), prediction.found.measured
    most = max(each.num_ranks for points in prediction.points.values() for each in points)
    ranks = sorted({*(round(2 ** (n / 8)) for n in range(int(8 * math.log2(most)) + 1)), most})
    work, machine = prediction.work, prediction.machine
    lines = {
        name: [point(name, work, machine, num).samples_per_second for num in ranks]
        for name in names
    }
    alone = point("single", work, machine, 1).samples_per_second
    ideal = [num * alone for num in ranks]
    rates = [rate for line in (*lines.values(), ideal) for rate in line]
    rates += prediction.measured.values()
    kind = "emulated" if found.devices else "measured"
    filled = f" (filled: {kind})" if prediction.measured else ""
    asked = max(prediction.question.ranks)
    title = f"Predicted: {found.name} on up to {asked:,} ranks, samples/s{filled}"
    sheet = Sheet(title, HEIGHT + FORECAST_TICKS, width=FORECAST_WIDTH)
    axes = sheet.axes(HEIGHT, left=0.85, right=NAMES)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(min(rates) / 1.5, max(rates) * 1.5)
    axes.set_xlim(0.9, 1.1 * max(most, found.num_ranks))
    dress(axes, x_label="ranks", grid="both")
    axes.yaxis.set_major_formatter(lambda value, _: tick(value))
    axes.yaxis.set_minor_formatter("")
    axes.plot(ranks, ideal, color=MUTED, linewidth=1.2, zorder=1.5)
    styles = {name: style_of(name, names) for name in (*names, *prediction.measured)}
    texts = {f"ideal: {percent(1.0)}": (ideal[-1], MUTED)}
    for name, line in lines.items():
        style, points = styles[name], prediction.points[name]
        look: Look = {"color": style.colour, "linestyle": LINES[style.dashes]}
        axes.plot(ranks, line, linewidth=2.2, zorder=2, **look)
        x, y = [each.num_ranks for each in points], [each.samples_per_second for each in points]
        look = {"marker": style.marker, "edgecolors": style.colour, "zorder": 3}
        axes.scatter(x, y, s=45, facecolors=PAPER, linewidths=1.6, **look)
        texts[f"{name}: {percent(line[-1] / ideal[-1])}"] = (line[-1], ink_of(style))
    for name, rate in prediction.measured.items():
        num = 1 if name == "single" else found.num_ranks
        look = {"marker": styles[name].marker, "color": styles[name].colour, "zorder": 4}
        axes.scatter([num], [rate], s=90, edgecolors=INK, **look)
    ends = [(1, rate) for rate, _ in texts.values()]
    heights = (axes.transData - axes.transAxes).transform(ends)[:, 1]
    placed = spread_out(list(heights), LABEL_GAP)
    for height, (text, (_, ink)) in zip(placed, texts.items(), strict=True):
        write_label(axes, 1.015, height, text, colour=ink, transform=axes.transAxes)
    return sheet.figure
