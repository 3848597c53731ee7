import io
import itertools
import math
from dataclasses import replace
from typing import Any

import matplotlib.text
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from PIL import Image

from ddpnb.history.comparison import Comparison, overlay
from ddpnb.history.model import Run, RunSnapshot, Status
from ddpnb.history.summary import time_to_target
from ddpnb.protocol.memory import Memory
from ddpnb.protocol.messages import Evaluation, Mark, MarkKind, Parts
from ddpnb.protocol.notation import Target
from ddpnb.reports.figures.figure import LiveFigure, draw
from ddpnb.reports.figures.series import Preparer, Series
from ddpnb.reports.formatting import notes, title
from ddpnb.reports.style import ACROSS, EVERYTHING, PART_COLOURS, PlotOptions
from tests.unit.history.fake_runs import (
    batch,
    fake_comparison,
    fake_run,
    header,
    run_of,
    spec,
    step,
)


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))


def to_rgb255(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def series_of(comparison: Comparison) -> tuple[Series, ...]:
    return Preparer().series_of(comparison)


def compared(*runs: Run) -> Comparison:
    return Comparison(comparison_id="c", name="c", runs=tuple(run.snapshot() for run in runs))


def shown_texts(comparison: Comparison) -> list[matplotlib.text.Text]:
    figure = draw(comparison)
    figure.canvas.draw()
    beyond = [  # tick labels that matplotlib keeps outside the limits, and does not draw
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
        for label in (tick.label1, tick.label2)
    ]
    texts = figure.findobj(matplotlib.text.Text)
    return [t for t in texts if t.get_visible() and t.get_text() and t not in beyond]


def test_the_picture_changes_while_a_comparison_trains():
    live = LiveFigure(fake_comparison(share=0.0, num_steps=60))
    seen = {live.png()}
    for share in (0.2, 0.4, 0.8, 1.0):
        live.update(fake_comparison(share=share, num_steps=60))
        seen.add(live.png())
    assert len(seen) == 5


def test_the_same_snapshot_gives_the_same_picture():
    live = LiveFigure(fake_comparison(num_steps=60))
    assert live.png() == live.png()


@pytest.mark.parametrize("strategies", [("ddp",), ("single", "dp", "ddp", "async")])
def test_what_is_drawn_piece_by_piece_is_what_is_drawn_at_once(strategies: tuple[str, ...]):
    nothing = fake_comparison(strategies, share=0.0, num_steps=100)
    by_piece, at_once = LiveFigure(nothing), LiveFigure(nothing)
    by_piece.png()
    for share in (0.05, 0.2, 0.5, 0.8, 1.0):
        comparison = fake_comparison(strategies, share=share, num_steps=100)
        for live in (by_piece, at_once):
            live.update(comparison)
        drawn = pixels(by_piece.png())
    np.testing.assert_array_equal(drawn, pixels(at_once.png()))


def test_the_size_is_fixed_and_the_corners_are_clear():
    for share in (0.0, 1.0):
        live = LiveFigure(fake_comparison(share=share, num_steps=60))
        drawn = pixels(live.png())
        assert drawn.shape == (742, 1400, 4)
        assert drawn[0, 0, 3] == 0
        assert tuple(drawn[235, 10]) == (255, 255, 255, 255)


def test_axes_stay_in_place_and_only_grow_upwards():
    live = LiveFigure(fake_comparison(num_steps=200))
    before = [axes.get_position().bounds + axes.axis() for axes in live.finish().axes]
    live.update(fake_comparison(num_steps=20))
    for old, axes in zip(before, live.finish().axes, strict=True):
        assert axes.get_position().bounds == old[:4]
        left, _, bottom, top = axes.axis()
        assert left == old[4]
        assert bottom <= old[6]
        assert top >= old[7]


@pytest.mark.parametrize("repeats", [1, 3])
def test_no_text_covers_another_and_all_are_inside(repeats: int):
    check_apart(fake_comparison(repeats=repeats))


def check_apart(comparison: Comparison) -> None:
    texts = shown_texts(comparison)
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    for index, (name, box) in enumerate(boxes):
        assert box.x0 > 0, name
        assert box.x1 < 1390, name
        for other, other_box in boxes[index + 1 :]:
            assert not box.padded(-1).overlaps(other_box.padded(-1)), (name, other)


def test_long_names_get_room():
    one = fake_comparison(("dp", "ddp"))
    runs = tuple(replace(run, comparison="lesson-22", run_id=run.run_id + "b") for run in one.runs)
    both = overlay([one, replace(one, name="lesson-22", runs=runs)])
    labels = [t for t in shown_texts(both) if "lesson-22/dp (emulated)" in t.get_text()]
    assert labels
    assert all(text.get_window_extent().x1 < 1395 for text in labels)
    colours = {series.style.colour for series in series_of(both)}
    assert len(colours) == 4


def test_no_text_is_smaller_than_eleven_points():
    assert min(text.get_fontsize() for text in shown_texts(fake_comparison())) >= 11


def test_what_is_emulated_says_so_at_each_line():
    texts = [text.get_text() for text in shown_texts(fake_comparison())]
    assert sum("dp (emulated)" in text for text in texts) == 5  # panels, row and note
    assert any("emulated on CPU threads" in text for text in texts)


def test_nothing_yet_is_drawn_as_waiting():
    empty = compared(run_of(spec("ddp"), created=1.0))
    assert sum(text.get_text().startswith("waiting for") for text in shown_texts(empty)) == 3


def test_nan_losses_leave_a_gap_and_a_note():
    comparison = compared(fake_run("single", num_steps=40, nan_from=30))
    (series,) = series_of(comparison)
    line = series.losses["samples"]
    assert np.isnan(line.y[30:]).all()
    assert len(line.bad_x) == 10
    assert any("10 losses were NaN" in text.get_text() for text in shown_texts(comparison))


def test_only_nan_losses_still_draw_throughput():
    run = fake_run("single", num_steps=40, nan_from=0)
    texts = [text.get_text() for text in shown_texts(compared(run))]
    assert sum(text.startswith("waiting for") for text in texts) == 2


def test_a_loop_without_samples_is_drawn_against_time_alone():
    run = Run(run_id="m", name="mine")
    run.add(batch("m", [step(i, i + 1.0, 2.0 / (i + 1), samples=0) for i in range(20)]))
    (series,) = series_of(compared(run))
    assert len(series.losses["samples"].x) == 0
    assert len(series.losses["seconds"].x) == 20
    assert LiveFigure(compared(run)).png()


def test_a_long_training_has_a_curve_of_its_rate_from_its_beginning_and_when_stopped():
    run = run_of(spec("single"), created=1.0)
    steps = [step(i, (i + 1) * 0.1, samples=32) for i in range(60)]
    run.add(batch(run.run_id, steps, header=header(spec("single"), 1_000_000)))
    (begun,) = series_of(compared(run))
    assert begun.throughput.x[0] <= 2.1
    run.end(Status.STOPPED)
    (stopped,) = series_of(compared(run))
    for each in (begun, stopped):
        assert len(each.throughput.x) > 100
        np.testing.assert_allclose(each.throughput.y, 320)


def test_one_step_and_negative_losses_can_be_drawn():
    run = run_of(spec("single"), created=1.0)
    run.add(batch(run.run_id, [step(0, 0.5, -3.0)], header=header(spec("single"), 1)))
    bottom, top = draw(compared(run)).axes[0].get_ylim()
    assert bottom <= -3.0 <= top


def test_runs_that_differ_are_named():
    one, other = fake_run("ddp", num_steps=20), fake_run("single", num_steps=20)
    changed = other.snapshot()
    assert changed.spec is not None
    changed = replace(changed, spec=replace(changed.spec, batch_size=64))
    comparison = Comparison(comparison_id="c", name="c", runs=(one.snapshot(), changed))
    texts = " ".join(text.get_text() for text in shown_texts(comparison))
    assert "these runs differ in batch size" in texts


def test_runs_on_other_machines_are_named():
    run = fake_run("ddp", num_steps=20).snapshot()
    where = {"ranks": "4", "CPU": "fast", "system": "Linux"}
    one = Comparison(comparison_id="a", name="a", runs=(run,), environment=where)
    other = replace(one, environment={"ranks": "4", "hosts": "a:2,b:2", "system": "Linux 6"})
    assert title(other) == "a: digits, global batch 256, 2 workers on cpu of 2 hosts"
    assert notes(overlay([one, one]), ()) == ()
    assert notes(overlay([one, other]), ()) == ("these runs differ in hosts",)
    slow = replace(other, environment=where | {"CPU": "slow", "ranks": "2"})
    assert notes(overlay([one, other, slow]), ()) == ("these runs differ in CPU, ranks and hosts",)


@pytest.mark.parametrize(
    ("choices", "note"),
    [
        ({"amp": "bf16", "clip": 1.0}, "these runs differ in amp and clip;"),
        ({"learning_rate": 0.1, "accumulate": 2, "slow": ("1:3x",)}, "differ in lr, accumulate an"),
        ({"task": "synthetic"}, "these runs differ in task;"),
        ({"task": "cell", "source": "def model(): ..."}, "these runs differ in task;"),
        ({"repeat": 3}, ""),
    ],
)
def test_other_choices_are_said_beside_the_plot(choices: dict[str, Any], note: str):
    one, other = fake_run("ddp", num_steps=20).snapshot(), fake_run("dp", num_steps=20).snapshot()
    assert other.spec is not None
    other = replace(other, spec=replace(other.spec, **choices))
    comparison = Comparison(comparison_id="c", name="c", runs=(one, other))
    texts = " ".join(text.get_text() for text in shown_texts(comparison))
    assert (note or "Faint") in texts
    assert ("these runs differ" in texts) == bool(note)


def test_other_cells_are_named():
    def of_cell(name: str, source: str) -> RunSnapshot:
        run = fake_run(name, num_steps=20).snapshot()
        assert run.spec is not None
        return replace(run, spec=replace(run.spec, task="cell", source=source))

    head = "# %%ddp_compare ddp\n"
    runs = [of_cell("ddp", f"{head}wide = 8"), of_cell("dp", "wide = 8"), of_cell("async", "a = 1")]
    same = Comparison(comparison_id="c", name="c", runs=tuple(runs[:2]))
    assert not any(note.startswith("these runs") for note in notes(same, ()))
    assert notes(same.with_runs(runs), ()) == ("these runs differ in the cell's code",)


def test_repeats_become_a_median_over_at_least_half():
    runs = []
    for repeat, level in enumerate((1.0, 2.0, 6.0)):
        run = run_of(spec("single", repeat), comparison="c", created=1.0)
        num_steps = 10 if repeat else 20
        steps = [step(i, i + 1.0, level) for i in range(num_steps)]
        run.add(batch(run.run_id, steps, header=header(spec("single", repeat), 1)))
        run.end(Status.FINISHED)
        runs.append(run)
    (series,) = series_of(compared(*runs))
    np.testing.assert_allclose(series.losses["samples"].y, 2.0)
    assert series.losses["samples"].x[-1] <= 100


def test_a_run_is_prepared_again_only_when_something_came():
    preparer, comparison = Preparer(), fake_comparison(("single", "ddp"), num_steps=30, share=0.9)
    single, ddp = preparer.series_of(comparison)
    assert (single.is_live, ddp.is_live) == (False, True)
    later = fake_comparison(("single", "ddp"), num_steps=30)
    assert preparer.series_of(later)[0] is single
    assert preparer.series_of(later)[1] is not ddp


def slowed(*strategies: str) -> Comparison:
    """Runs of which rank 1 became slow, as they are stored."""
    mark = Mark(rank=1, seconds=2.0, text="3x slower")
    runs = [fake_run(name, num_steps=150, slow_rank=1, marks=[mark]) for name in strategies]
    whole = compared(*runs)
    return replace(whole, specs=tuple(run.spec for run in whole.runs if run.spec))


def test_the_lane_of_a_rank_is_blank_while_it_was_away():
    kinds = ((1, MarkKind.KILLED), (2, MarkKind.CAME_BACK))
    marks = [Mark(rank=1, seconds=at, kind=kind) for at, kind in kinds]
    run = run_of(spec("async"))
    for rank in range(2):
        times = [0.04 * i for i in range(1, 100) if rank == 0 or not 25 <= i < 50]
        parts = Parts(forward=0.03)
        steps = [replace(step(i, at), parts=parts) for i, at in enumerate(times)]
        head = header(spec("async"), 100)
        run.add(batch(run.run_id, steps, rank=rank, header=head, marks=marks if rank else ()))
    run.end(Status.FINISHED)
    died = compared(run)
    (image,) = draw(died).findobj(AxesImage)
    at = np.linspace(0.0, image.get_extent()[1], image.get_array().shape[1])[:-5]
    first, second = (image.get_array()[row, : len(at), 3] for row in (0, 7))
    assert first.all()
    assert not second[(at > 1.05) & (at < 2)].any()
    assert second[(at < 0.95) | (at > 2)].all()
    texts = [text.get_text() for text in shown_texts(died)]
    assert "rank 1 died" in texts
    assert "even" not in texts


def titles(comparison: Comparison, options: PlotOptions = EVERYTHING) -> list[str]:
    return [axes.get_title(loc="left") for axes in draw(comparison, options).axes]


BELOW = ["Samples per second", "Time of one step, ms", "Own work by rank", "Staleness"]


def test_bars_stand_below_where_there_is_something_to_tell():
    assert titles(slowed("ddp", "async"))[3:] == BELOW
    assert titles(slowed("ddp"))[3:] == BELOW[:3]
    assert titles(slowed("single"))[3:] == BELOW[:2]
    run = Run(run_id="m", name="mine")
    run.add(batch("m", [step(i, i + 1.0) for i in range(20)]))
    assert len(titles(compared(run))) == 3


def test_all_that_may_come_has_its_place_before_anything_has_begun():
    for strategies, num_columns in ((("single", "async"), 4), (("single", "ddp"), 3)):
        early = fake_comparison(strategies, share=0.0)
        live = LiveFigure(early)
        empty = pixels(live.png())
        live.update(fake_comparison(strategies, num_steps=40))
        assert pixels(live.png()).shape == empty.shape
        assert len(live.finish().axes) == 3 + num_columns
        assert [text.get_text() for text in shown_texts(early)].count(strategies[1]) == 1


def test_a_straggler_and_what_struck_it_are_shown():
    texts = [text.get_text() for text in shown_texts(slowed("ddp"))]
    assert "rank 1: 1.3×" in texts
    assert " rank 1: 3x slower " in texts
    assert "rank 1 3x slower at 2.0 s" in " ".join(texts)


def marked(*marks: tuple[float, str]) -> list[matplotlib.text.Text]:
    """What is said of such marks of rank 1 in a figure."""
    found = [Mark(rank=1, seconds=seconds, text=text) for seconds, text in marks]
    texts = shown_texts(compared(fake_run("ddp", num_steps=150, slow_rank=1, marks=found)))
    return [text for text in texts if "rank 1: " in text.get_text() and "×" not in text.get_text()]


@pytest.mark.parametrize("seconds", [0.4, 1.8, 2.4, 3.3])
def test_what_is_said_of_a_mark_stays_inside_its_axes(seconds: float):
    (text,) = marked((seconds, "came back"))
    box, around = text.get_window_extent(), text.axes.bbox
    assert around.x0 <= box.x0
    assert box.x1 <= around.x1


def test_a_rank_that_was_killed_is_named_also_where_it_came_back():
    (text,) = marked((2.5, "came back"), (0.5, "3x slower"), (1.0, "killed"))
    assert text.get_text() == " rank 1: killed \n rank 1: came back "


def test_names_are_kept_clear_of_bars_neighbours_and_the_edge():
    names = ("async", "async:compensate=on", "async:bound=2")
    runs = [fake_run(name, num_steps=60) for name in names]
    texts = shown_texts(compared(*runs))
    axes = texts[-1].figure.axes
    for text in texts:
        box = text.get_window_extent()
        assert box.x1 < 1390, text.get_text()
        if text.get_text() in names or "exposed" in text.get_text():
            touched = [a for a in axes if a is not text.axes and a.bbox.overlaps(box.padded(4))]
            assert not touched, text.get_text()


def test_numbers_at_an_axis_keep_their_distance():
    for factor in (1, 10, 100):
        runs = []
        for name in ("single", "ddp", "async"):
            run = run_of(spec(name), created=1.0)
            steps = [step(i, (i + 1) / 100, 1.0, samples=11 * factor) for i in range(50)]
            run.add(batch(run.run_id, steps, header=header(spec(name), 50)))
            run.end(Status.FINISHED)
            runs.append(run)
        for axes in draw(fake_comparison().with_runs([run.snapshot() for run in runs])).axes:
            axes.figure.canvas.draw()
            left, right = axes.get_xlim()
            boxes = [
                tick.label1.get_window_extent()
                for tick in axes.xaxis.get_major_ticks()
                if left <= tick.get_loc() <= right and tick.label1.get_visible()
            ]
            if "Staleness" not in axes.get_title(loc="left"):
                gaps = [b.x0 - a.x1 for a, b in itertools.pairwise(boxes)]
                assert min(gaps, default=99.0) > 7, axes.get_title(loc="left")


def test_the_footer_ends_with_a_whole_note():
    notes_ = {"ddp": "a note of middling length on how this came about", "dp": "a longer one " * 9}
    runs = []
    for name, note in notes_.items():
        run = fake_run(name, num_steps=20).snapshot()
        assert run.header is not None
        runs.append(replace(run, header=replace(run.header, notes=(note.strip(),))))
    both, one = (Comparison(comparison_id="c", name="c", runs=tuple(r)) for r in (runs, runs[1:]))
    footer, alone = (
        next(text.get_text() for text in shown_texts(each) if text.get_text().startswith("Faint"))
        for each in (both, one)
    )
    assert footer.endswith(f"ddp: {notes_['ddp']}; more below the table")
    assert alone.endswith(f"dp: {notes_['dp'].strip()}") or alone.endswith(". More below the table")


def test_exposed_communication_is_shown():
    assert any("24 % exposed" in text.get_text() for text in shown_texts(fake_comparison()))


def test_an_outline_is_explained_only_where_there_is_one():
    def explained(*names: str) -> list[str]:
        texts = [text.get_text() for text in shown_texts(slowed(*names))]
        return [text for text in texts if "outline" in text or "┃" in text]

    assert explained("single", "ddp") == ["outline: workers × single"]
    assert explained("single", "ddp", "no-comm") == ["outline: ideal  ┃ no-comm"]
    assert explained("ddp", "no-comm") == ["┃ no-comm"]
    assert explained("ddp", "async") == []


@pytest.mark.parametrize("x", ACROSS)
def test_losses_are_drawn_against_what_was_chosen(x: str):
    comparison = fake_comparison(("single", "async"), num_steps=50)
    first = draw(comparison, PlotOptions(x=x)).axes[0]
    right = {"samples": 50 * 256, "seconds": 1.0, "updates": 50}[x]
    assert right <= first.get_xlim()[1] <= 2.6 * right
    assert len(titles(comparison, PlotOptions(x=x))) == 2 + 4


def test_a_target_is_drawn_and_a_logarithmic_axis_shows_no_zero():
    comparison = fake_comparison(("single", "ddp"))
    figure = draw(comparison, PlotOptions(log=True, target=Target(value=0.3)))
    texts = [text.get_text() for text in figure.findobj(matplotlib.text.Text)]
    assert texts.count("target 0.3") == 2
    bottom, top = figure.axes[0].get_ylim()
    assert figure.axes[0].get_yscale() == "log"
    assert 0 < bottom < 0.3 < top


def test_losses_that_cannot_stand_on_a_logarithmic_axis_do_no_harm():
    run = Run(run_id="m", name="mine")
    run.add(batch("m", [step(i, i + 1.0, -1.0) for i in range(20)]))
    figure = draw(compared(run), PlotOptions(log=True))
    figure.canvas.draw()
    assert (
        sum(
            t.get_text() == "waiting for the first steps" and t.get_visible()
            for t in figure.findobj(matplotlib.text.Text)
        )
        == 2
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_losses_that_are_no_numbers_are_shown_as_such(bad: float):
    run = Run(run_id="m", name="mine")
    run.add(batch("m", [step(i, i + 1.0, bad if i > 10 else 1.0) for i in range(20)]))
    texts = [text.get_text() for text in shown_texts(compared(run))]
    assert texts.count(" NaN or ∞ ") == 2
    assert any("9 losses were NaN or infinite" in text for text in texts)


@pytest.mark.parametrize("num", [1, 9, 16])
def test_one_strategy_or_many_no_text_covers_another(num: int):
    names = ["single", *(f"Own{number}" for number in range(num - 1))]
    runs = [fake_run(name, num_steps=60) for name in names]
    texts = shown_texts(compared(*runs))
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    for index, (name, box) in enumerate(boxes):
        for other, other_box in boxes[index + 1 :]:
            assert not box.padded(-1.5).overlaps(other_box.padded(-1.5)), (name, other)


def test_a_quick_redraw_is_the_picture_that_matplotlib_draws():
    comparison = fake_comparison(num_steps=60, share=0.9)
    live = LiveFigure(fake_comparison(num_steps=60, share=0.7))
    live.png()
    live.update(comparison)
    quick = pixels(live.png()).astype(int)
    fresh = LiveFigure(comparison)
    buffer = io.BytesIO()
    with matplotlib.rc_context({"text.hinting": "no_hinting"}):  # as the live figure does
        fresh.finish().savefig(buffer, format="png", dpi=100)
    differs = np.abs(quick - pixels(buffer.getvalue()).astype(int)).max(axis=2) > 60
    assert differs.mean() < 0.01


def test_a_frame_of_256_colours_looks_like_the_last_picture():
    live = LiveFigure(fake_comparison(num_steps=60, share=0.9))
    frame = live.png()
    live.update(fake_comparison(num_steps=60))
    last = live.png()
    assert Image.open(io.BytesIO(frame)).mode == "P"
    assert Image.open(io.BytesIO(last)).mode == "RGBA"
    title = np.s_[20:60, 20:-20]  # the same in both
    error = np.abs(pixels(frame)[title].astype(int) - pixels(last)[title].astype(int))
    assert error.max() <= 40
    assert error.mean() < 1.5
    assert pixels(frame)[0, 0, 3] == 0
    swatches = {
        colour: np.argwhere((pixels(last)[:, :, :3] == to_rgb255(colour)).all(axis=2))[0]
        for colour in PART_COLOURS.values()
    }
    for colour, (y, x) in swatches.items():
        np.testing.assert_allclose(pixels(frame)[y, x, :3], to_rgb255(colour), atol=6)


def test_nothing_moves_when_a_strategy_turns_out_to_be_emulated():
    live = LiveFigure(fake_comparison(share=0.1, num_steps=40))
    before = [axes.get_position().bounds for axes in live.finish().axes]
    live.update(fake_comparison(share=1.0, num_steps=40))
    assert [axes.get_position().bounds for axes in live.finish().axes] == before


def test_what_stands_still_is_drawn_once_while_a_run_trains(monkeypatch: pytest.MonkeyPatch):
    drawn: list[Figure] = []
    whole = Figure.draw
    monkeypatch.setattr(Figure, "draw", lambda self, to: (drawn.append(self), whole(self, to)))
    strategies = ("single", "ddp", "no-comm")
    live = LiveFigure(fake_comparison(strategies, share=0.6))
    live.png()
    counts = [len(drawn)]
    for share in (0.61, 0.62, 0.63, 1.0):
        live.update(fake_comparison(strategies, share=share))
        live.png()
        counts.append(len(drawn))
    assert counts[0] == 1
    assert counts[-2] <= 2, "axes may have grown once"
    assert counts[-1] == counts[-2] + 1, "the last runs have ended"


def curved(comparison: Comparison, *, accuracy: bool = True) -> Comparison:
    """The same with a held-out curve of five points, the trained model's included."""
    runs = []
    for run in comparison.runs:
        total, seconds = run.num_samples, run.seconds
        points = tuple(
            Evaluation(
                round(total * share),
                seconds * share,
                1.0 - share,
                0.5 + 0.5 * share if accuracy else math.nan,
            )
            for share in (0.2, 0.4, 0.6, 0.8)
        )
        reports = [
            replace(
                each,
                evaluations=() if each.rank else points,
                held_out_accuracy=each.held_out_accuracy if accuracy else math.nan,
            )
            for each in run.reports
        ]
        runs.append(replace(run, reports=tuple(reports)))
    return comparison.with_runs(runs)


@pytest.mark.parametrize("repeats", [1, 3])
def test_held_out_curves_have_panels_of_their_own(repeats: int):
    comparison = curved(fake_comparison(repeats=repeats))
    figure = draw(comparison, PlotOptions(target=Target(value=0.75, is_accuracy=True)))
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles[3:6] == [
        "Held-out accuracy by samples",
        "Held-out accuracy by time",
        "Held-out loss by samples",
    ]
    tops = [axes.get_position().y0 for axes in figure.axes[:6]]
    assert tops[0] == tops[1] == tops[2] > tops[3] == tops[4] == tops[5]
    texts = [text.get_text() for text in figure.findobj(matplotlib.text.Text)]
    assert texts.count("target 0.75") == 2
    bottom, top = figure.axes[3].get_ylim()
    assert (bottom, top) == (pytest.approx(0.5), 1.0), "near the lowest accuracy, and up to all"
    line = series_of(comparison)[0].held_out["accuracy", "samples"]
    assert line.x[-1] == comparison.runs[0].num_samples
    assert line.y[-1] == pytest.approx(0.9611)


def test_a_task_without_accuracy_has_the_held_out_loss_alone():
    titles = [
        axes.get_title("left")
        for axes in draw(curved(fake_comparison(("ddp",)), accuracy=False)).axes
    ]
    assert titles[3:5] == ["Held-out loss by samples", "Held-out loss by time"]


def test_no_text_of_held_out_curves_covers_another():
    check_apart(curved(fake_comparison()))


def test_a_live_figure_gets_held_out_panels_when_all_is_over():
    comparison = fake_comparison(("ddp",), num_steps=60)
    live = LiveFigure(comparison)
    assert not live.lacks_panels(comparison)
    assert live.lacks_panels(curved(comparison))
    assert not LiveFigure(curved(comparison)).lacks_panels(curved(comparison))


def holding(comparison: Comparison, **held: Memory) -> Comparison:
    """The same with ranks that hold so much."""
    return comparison.with_runs(
        [
            replace(r, reports=tuple(replace(each, memory=held[r.name]) for each in r.reports))
            for r in comparison.runs
        ]
    )


def test_unlike_memory_has_a_bar_of_its_parts():
    title, plain = "Memory per rank, MB", fake_comparison(("single", "ddp", "dp"))
    ddp = Memory(4_000_000, 4_000_000, 4_000_000, 1_000_000)
    alike = holding(plain, single=ddp._replace(activations=9_000_000), ddp=ddp, dp=ddp)
    assert title not in titles(alike)
    unlike = holding(
        plain, single=ddp, ddp=ddp, dp=ddp._replace(parameters=1_000_000, peak=30_000_000)
    )
    live = LiveFigure(plain)
    assert live.lacks_panels(unlike)
    assert not live.lacks_panels(alike)
    check_apart(unlike)
    (axes,) = [each for each in draw(unlike).axes if each.get_title("left") == title]
    widths = [each.get_width() for each in axes.patches if each.get_visible()]
    assert widths == [4, 4, 4, 1, 4, 4, 4, 1, 1, 4, 4, 1, 30]  # the last one around its parts
    assert {"13 MB", "30 MB"} <= {text.get_text() for text in axes.texts}


def test_memory_takes_the_place_of_ranks_that_are_even():
    held = {"single": Memory(9), "ddp": Memory(9), "async": Memory(18)}
    even = holding(fake_comparison(tuple(held)), **held)
    found = titles(even)
    check_apart(even)
    assert "Memory per rank, MB" in found
    assert "Own work by rank" not in found
    found = titles(holding(slowed(*held), **held))
    assert "Memory per rank, MB" not in found
    assert "Own work by rank" in found


def test_when_an_accuracy_was_reached():
    (run,) = curved(fake_comparison(("ddp",))).runs
    total, whole = run.num_samples, run.seconds
    seconds, samples = time_to_target(run, Target(value=0.75, is_accuracy=True))
    assert (seconds, samples) == (pytest.approx(0.5 * whole), pytest.approx(0.5 * total, abs=1))
    assert all(map(math.isnan, time_to_target(run, Target(value=0.99, is_accuracy=True))))
    (plain,) = fake_comparison(("ddp",)).runs
    assert all(map(math.isnan, time_to_target(plain, Target(value=0.5, is_accuracy=True))))


def test_the_median_of_held_out_curves_is_made_point_by_point():
    comparison = curved(fake_comparison(("ddp",), repeats=3))
    (series,) = series_of(comparison)
    seconds = [run.seconds for run in comparison.runs]
    line = series.held_out["accuracy", "seconds"]
    assert line.x == pytest.approx(np.median(seconds) * np.array([0.2, 0.4, 0.6, 0.8, 1.0]))
    assert line.y[:4] == pytest.approx([0.6, 0.7, 0.8, 0.9])
