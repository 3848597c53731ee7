import math
from dataclasses import replace

import matplotlib.text
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddpnb.protocol.messages import Evaluation, Mark, Memory
from ddpnb.protocol.notation import Target
from ddpnb.reports.figures import figure as figures
from ddpnb.reports.figures.curves import held_out, losses
from ddpnb.reports.formatting import notes, title
from ddpnb.reports.result import ComparisonResult
from ddpnb.reports.style import EVERYTHING, PlotOptions
from ddpnb.results.comparison import Comparison, overlay
from ddpnb.results.frames import strategy_rows, time_to_target
from ddpnb.results.run import Status
from tests.unit.results.fake_runs import (
    KeptRun,
    batch,
    compared,
    ended_run,
    fake_comparison,
    fake_run,
    run_of,
    spec,
    step,
)


def draw(comparison: Comparison, options: PlotOptions = EVERYTHING, **state: bool) -> Figure:
    return figures.draw(comparison, strategy_rows(comparison, options.target), options, **state)


def shown_texts(
    comparison: Comparison, options: PlotOptions = EVERYTHING
) -> list[matplotlib.text.Text]:
    figure = draw(comparison, options)
    figure.draw_without_rendering()
    beyond = [  # tick labels outside the limits, which matplotlib does not draw
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
        for label in (tick.label1, tick.label2)
    ]
    texts = figure.findobj(matplotlib.text.Text)
    return [t for t in texts if t.get_visible() and t.get_text() and t not in beyond]


def words(comparison: Comparison, options: PlotOptions = EVERYTHING) -> list[str]:
    return [text.get_text() for text in shown_texts(comparison, options)]


def titles(comparison: Comparison, options: PlotOptions = EVERYTHING, **state: bool) -> list[str]:
    return [axes.get_title(loc="left") for axes in draw(comparison, options, **state).axes]


def axes_called(title: str, comparison: Comparison, options: PlotOptions = EVERYTHING) -> Axes:
    (found,) = [a for a in draw(comparison, options).axes if a.get_title("left") == title]
    return found


LOSSES = ["Training loss by samples", "Training loss by time, s"]
ALWAYS = ["Samples per second", "Time of one step, ms"]
ALL, LOG = PlotOptions(panels="all"), PlotOptions(log=True)


def test_no_text_covers_another_and_all_are_inside():
    held = holding(
        curved(slowed("ddp", "async")), ddp=Memory(20_000_000), async_=Memory(40_000_000)
    )
    names = [*(f"Own{n}" for n in range(14)), "async:compensate=on", "async:bound=2"]
    many = compared(*(fake_run(name, num_steps=20) for name in names))
    long = slowed("single", "ddp", "async", "local-sgd:every=8")
    curves = curved(fake_comparison())
    shown = (held, ALL), (many, EVERYTHING), (curves, ALL), (long, EVERYTHING)
    for comparison, options in shown:
        texts = shown_texts(comparison, options)
        boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
        edge = texts[0].figure.bbox.width - 10
        for index, (name, box) in enumerate(boxes):
            assert box.x0 > 0, name
            assert box.x1 < edge, name
            for other, other_box in boxes[index + 1 :]:
                assert not box.padded(-1.5).overlaps(other_box.padded(-1.5)), (name, other)


def test_negative_losses_are_drawn_and_where_there_is_none_it_is_said():
    one = ended_run("single", [step(0, 0.5, -3.0)])
    bottom, top = axes_called(LOSSES[0], compared(one)).get_ylim()
    assert bottom <= -3.0 <= top
    texts = words(compared(one), LOG)
    assert sum(text.startswith("waiting for") for text in texts) == 2


@pytest.mark.parametrize("status", ["running", "stopped", "failed"])
def test_a_comparison_is_shown_before_its_first_step_and_if_it_ends_there(status: str):
    run = replace(run_of(spec("ddp")).snapshot(), status=Status(status))
    comparison = fake_comparison(()).with_runs([run])
    result = ComparisonResult(comparison, ALL)
    assert draw(comparison, ALL, is_live=status == "running").axes
    assert "ddp" in result.text()
    assert [len(frame) for frame in (result.runs(), result.strategies())] == [1, 1]
    assert [len(frame) for frame in (result.ratios(), result.steps())] == [0, 0]


def test_nan_losses_leave_a_gap_and_a_note():
    comparison = compared(fake_run("single", num_steps=40, nan_from=30))
    line = losses(comparison.runs, "samples")
    assert np.isnan(line.y[30:]).all()
    assert len(line.bad_x) == 10
    assert words(comparison).count(" NaN or ∞ ") == 2


def test_a_loop_without_samples_is_drawn_against_time_alone():
    run = KeptRun(run_id="m", name="mine")
    run.add(batch("m", [step(i, i + 1.0, 2.0 / (i + 1), samples=0) for i in range(20)]))
    assert [len(losses([run.snapshot()], x).x) for x in ("samples", "seconds")] == [0, 20]
    assert draw(compared(run)).axes


def test_runs_on_other_machines_and_of_other_cells_are_named():
    run = fake_run("ddp", num_steps=20).snapshot()
    where = {"ranks": "4", "CPU": "fast", "system": "Linux"}
    one = Comparison(comparison_id="a", name="a", runs=(run,), environment=where)
    other = replace(one, environment={"ranks": "4", "hosts": "a:2,b:2", "system": "Linux 6"})
    assert title(other) == "a: digits, global batch 256, 2 workers on cpu of 2 hosts"
    assert notes(overlay([one, one]), ()) == ()
    slow = replace(other, environment=where | {"CPU": "slow", "ranks": "2"})
    assert notes(overlay([one, other, slow]), ()) == ("these runs differ in CPU, ranks and hosts",)
    cells = [
        replace(run.spec, task="cell", source=text) for text in ("# %%ddp_compare a\na", "a", "b")
    ]
    same, also, unlike = (replace(run, spec=spec, comparison="c") for spec in cells)
    assert not any(note.startswith("these runs") for note in notes(one.with_runs([same, also]), ()))
    assert notes(one.with_runs([also, unlike]), ()) == ("these runs differ in the cell's code",)


def test_repeats_become_a_median_over_at_least_half():
    runs = [
        ended_run("single", [step(i, i + 1.0, level) for i in range(num)], repeat=repeat)
        for repeat, (level, num) in enumerate(((1.0, 20), (2.0, 10), (6.0, 10)))
    ]
    line = losses(compared(*runs).runs, "samples")
    np.testing.assert_allclose(line.y, 2.0)
    assert line.x[-1] <= 100


def slowed(*strategies: str) -> Comparison:
    """Return stored runs in which rank 1 became slow."""
    mark = Mark(rank=1, seconds=1.0, text="3x slower")
    runs = [fake_run(name, num_steps=150, slow_rank=1, marks=[mark]) for name in strategies]
    whole = compared(*runs)
    return replace(whole, specs=tuple(run.spec for run in whole.runs if run.spec))


def test_ranks_and_staleness_stand_where_they_say_something():
    plain = fake_comparison(("single", "ddp"))
    assert titles(plain) == LOSSES + ALWAYS
    assert titles(slowed("ddp")) == [*LOSSES, *ALWAYS, "Own work by rank"]
    assert titles(fake_comparison(("single", "async"))) == [*LOSSES, *ALWAYS, "Staleness"]
    run = KeptRun(run_id="m", name="mine")
    run.add(batch("m", [step(i, i + 1.0) for i in range(20)]))
    assert titles(compared(run)) == LOSSES
    held = holding(curved(slowed("ddp", "async")), ddp=Memory(20), async_=Memory(20))
    assert titles(held, ALL) == [
        *(*LOSSES, "Held-out accuracy by samples", "Held-out accuracy by time, s"),
        *("Held-out loss by samples", *ALWAYS),
        *("Own work by rank", "Rank's memory, MB", "Staleness"),
    ]


@pytest.mark.parametrize("seconds", [0.4, 3.3])
def test_a_rank_that_was_killed_is_named_inside_the_axes(seconds: float):
    struck = ((0.1, "3x slower"), (seconds, "killed"), (seconds + 0.1, "came back"))
    marks = [Mark(rank=1, seconds=at, text=text) for at, text in struck]
    texts = shown_texts(compared(fake_run("ddp", num_steps=150, slow_rank=1, marks=marks)))
    assert "rank 1: 1.3×" in [each.get_text() for each in texts]
    (text,) = [each for each in texts if "killed" in each.get_text()]
    assert text.get_text() == " rank 1: killed \n rank 1: came back "
    box, around = text.get_window_extent(), text.axes.bbox
    assert around.x0 <= box.x0
    assert box.x1 <= around.x1


def test_a_target_is_drawn_and_a_logarithmic_axis_shows_no_zero():
    comparison = curved(fake_comparison(("single", "ddp")))
    options = PlotOptions(log=True, target=Target(value=0.3))
    assert words(comparison, options).count("- - target 0.3") == 2
    assert titles(comparison, options)[:2] == LOSSES, "the panels must show the target's quantity"
    axes = axes_called(LOSSES[0], comparison, options)
    bottom, top = axes.get_ylim()
    assert axes.get_yscale() == "log"
    assert 0 < bottom < 0.3 < top


def curved(comparison: Comparison, *, accuracy: bool = True) -> Comparison:
    """Add a held-out curve of five points, including the trained model, to each run."""
    runs = []
    for run in comparison.runs:
        points = tuple(
            Evaluation(
                num_samples=round(run.num_samples * share),
                seconds=run.seconds * share,
                loss=1.0 - share,
                accuracy=0.5 + 0.5 * share if accuracy else math.nan,
            )
            for share in (0.2, 0.4, 0.6, 0.8)
        )
        first, *others = run.reports
        last = first.held_out_accuracy if accuracy else math.nan
        first = replace(first, evaluations=points, held_out_accuracy=last)
        runs.append(replace(run, reports=(first, *others)))
    return comparison.with_runs(runs)


def test_a_held_out_score_takes_the_place_of_the_loss_at_the_end():
    comparison = curved(fake_comparison(("ddp",), repeats=3))
    options = PlotOptions(target=Target(value=0.75, is_accuracy=True))
    assert titles(comparison, options)[:2] == [LOSSES[0], "Held-out accuracy by time, s"]
    assert titles(comparison, options, is_live=True)[:2] == LOSSES
    axes = axes_called("Held-out accuracy by time, s", comparison, options)
    assert axes.get_ylim() == (pytest.approx(0.5), 1.0), "from the lowest accuracy to 1"
    assert "- - target 0.75" in [text.get_text() for text in axes.texts]
    line = held_out(comparison.runs, "seconds", "accuracy")
    seconds = np.median([run.seconds for run in comparison.runs])
    assert line.x == pytest.approx(seconds * np.array([0.2, 0.4, 0.6, 0.8, 1.0]))
    assert line.y == pytest.approx([0.6, 0.7, 0.8, 0.9, 0.9611])
    without = curved(fake_comparison(("ddp",)), accuracy=False)
    assert titles(without)[1] == "Held-out loss by time, s"


def holding(comparison: Comparison, **held: Memory) -> Comparison:
    """Set the memory of runs by strategy. Write ``async_`` because ``async`` is a keyword."""
    runs = []
    for run in comparison.runs:
        memory = held.get(run.name, held.get(f"{run.name}_", Memory()))
        reports = tuple(replace(each, memory=memory) for each in run.reports)
        runs.append(replace(run, reports=reports))
    return comparison.with_runs(runs)


def test_unlike_memory_has_a_bar_of_its_parts():
    title, plain = "Rank's memory, MB", fake_comparison(("single", "ddp", "dp"))
    ddp = Memory(4_000_000, 4_000_000, 4_000_000, 1_000_000)
    alike = holding(plain, single=ddp._replace(activations=90_000_000), ddp=ddp, dp=ddp)
    assert title not in titles(alike)
    more = ddp._replace(parameters=14_000_000, peak=30_000_000)
    unlike = holding(plain, single=ddp, ddp=ddp, dp=more)
    axes = axes_called(title, unlike)
    widths = [each.get_width() for each in axes.patches]
    assert widths == [4, 4, 4, 1, 4, 4, 4, 1, 14, 4, 4, 1, 30]  # the last bar is the peak
    assert {"13 MB", "30 MB"} <= {text.get_text() for text in axes.texts}


def test_when_an_accuracy_was_reached():
    (run,) = curved(fake_comparison(("ddp",))).runs
    total, whole = run.num_samples, run.seconds
    seconds, samples = time_to_target(run, Target(value=0.75, is_accuracy=True))
    assert (seconds, samples) == (pytest.approx(0.5 * whole), pytest.approx(0.5 * total, abs=1))
    assert all(map(math.isnan, time_to_target(run, Target(value=0.99, is_accuracy=True))))
    (plain,) = fake_comparison(("ddp",)).runs
    assert all(map(math.isnan, time_to_target(plain, Target(value=0.5, is_accuracy=True))))
