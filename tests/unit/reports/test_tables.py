import math
import random
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from ddpnb.protocol.messages import Evaluating, Memory
from ddpnb.protocol.notation import Target
from ddpnb.reports.formatting import duration, number, percent, short, size, tick
from ddpnb.reports.inspection.advice import advice_table
from ddpnb.reports.listing import ranks_table, runs_table
from ddpnb.reports.progress import progress_of
from ddpnb.reports.result import ComparisonResult, five_columns, how_to_read
from ddpnb.reports.style import PlotOptions
from ddpnb.reports.table import Cell, Column, Table
from ddpnb.results.comparison import Comparison
from ddpnb.results.frames import runs_frame
from ddpnb.results.run import Run, Status
from tests.rank.ranks import make_state
from tests.unit.results.fake_runs import (
    STEP_SECONDS,
    batch,
    compared,
    fake_comparison,
    fake_run,
    header,
    run_of,
    spec,
    step,
    stored,
)

SPEEDS = ["strategy", "samples/s", "speed-up"]
EVIL = "<script>alert('x')</script>"


def results_table(comparison: Comparison, target: Target | None = None) -> Table:
    return ComparisonResult(comparison, PlotOptions(target=target)).table()


def sentence(comparison: Comparison, target: Target | None = None) -> str:
    return ComparisonResult(comparison, PlotOptions(target=target)).sentence()


def check_html(html: str) -> None:
    """Raise an error if the tags are not closed in order."""
    ElementTree.fromstring(f"<div>{re.sub('<(img|meta)[^>]*>', '', html)}</div>")


def test_numbers_in_words():
    numbers = (0.1184, 12345.6, 0.0, math.nan, 1.5, 99.96)
    assert [number(v) for v in numbers] == ["0.118", "12,346", "0", "–", "1.50", "100"]
    assert [size(v) for v in (12, 49_380, 4.6e6, 2.5e9)] == ["12 B", "49 kB", "4.6 MB", "2.5 GB"]
    assert [short(v) for v in (17_123, 999.6, 2_500_000, 12)] == ["17.1k", "1.00k", "2.50M", "12.0"]
    assert number(float("inf")) == "∞"
    assert percent(0.9611, 1) == "96.1 %"
    draw = random.Random(0)
    for value in (10 ** draw.uniform(-300, 2) for _ in range(500)):
        assert float(number(value)) == pytest.approx(value, rel=0.006)
        assert float(tick(value)) == pytest.approx(value, rel=0.006)
    assert [duration(s) for s in (12.4, 200, 7260)] == ["12 s", "3 min 20 s", "2 h 1 min"]


def test_everything_is_escaped():
    table = Table(
        caption=EVIL,
        columns=(Column(title=EVIL), Column(title="b", is_number=True)),
        rows=((Cell(text=EVIL, quiet=EVIL, dot=EVIL), Cell(text=EVIL)),),
        notes=(EVIL,),
    )
    assert "<script" not in table.html()
    check_html(table.html())


def test_the_scores_in_text():
    table = results_table(fake_comparison())
    check_html(table.html())
    text = table.text()
    dp = next(line for line in text.splitlines() if line.startswith("dp "))
    speed = r"\([\d,]+\) +\(1\.\d\d×\) +\(\d\d %\)"
    assert re.search(rf"dp \(emulated\) +{speed}", dp)
    assert "numbers in brackets: emulated on CPU threads" in text
    assert re.search(r"async .* 1 / 3 .* 94\.7 %", text)


def test_a_class_sees_five_columns_and_the_others_folded():
    for comparison, target, titles in (
        (fake_comparison(), None, [*SPEEDS, "efficiency", "held-out accuracy"]),
        (fake_comparison(), Target(value=0.3), [*SPEEDS, "to loss 0.3", "held-out accuracy"]),
        (fake_comparison(("ddp",)), None, ["strategy", "samples/s", "exposed"]),
    ):
        whole = results_table(comparison, target)
        five = five_columns(whole)
        found = [column.title for column in five.columns]
        assert len(found) == 5
        assert set(titles) <= set(found)
        assert all(column.about for column in whole.columns)
        assert column_texts(five, "samples/s") == column_texts(whole, "samples/s")
        check_html(how_to_read(whole))


def test_under_weak_scaling_each_run_has_a_global_batch_of_its_own():
    runs = []
    for name, num_samples in (("single", 32), ("dp", 64)):  # dp's process reports both shards
        weak = replace(spec(name), batch_per_worker=32)
        run = run_of(weak)
        steps = [step(n, n + 1.0, samples=num_samples) for n in range(3)]
        run.add(batch(weak.run_id, steps, header=header(weak, 3)))
        assert len(run.snapshot().curve) == 3, "the curve must not wait for another rank"
        runs.append(run)
    assert "global batch 32 per worker" in results_table(compared(*runs)).caption
    assert runs_frame(compared(*runs))["batch_size"].tolist() == [32, 64]


def test_ranks_that_share_a_device_say_with_whom():
    state = replace(make_state(0, 2), device="cuda:0", pid=4000, shares_device=True)
    text = ranks_table([replace(state, rank=1), state]).text()
    assert "2 ranks ready" in text
    assert re.search(r"^0 +4000 .* shares cuda:0 with rank 1$", text, re.MULTILINE)
    assert "shares" not in ranks_table([replace(state, shares_device=False)]).text()


CPU = make_state(0, 2)
GPU = replace(CPU, device="cuda:0", has_peer_access=True)


@pytest.mark.parametrize(
    ("ranks", "recommended", "tensorflow"),
    [
        ([GPU, GPU], "ddp", "MirroredStrategy"),
        ([replace(GPU, has_peer_access=False)] * 2, "central", "CentralStorageStrategy"),
        ([GPU, replace(GPU, host="other")], "ddp", "MultiWorkerMirroredStrategy"),
        ([CPU, CPU], "ddp", "MirroredStrategy on CPUs"),
        ([CPU], "single", "OneDeviceStrategy"),
    ],
)
def test_advice_marks_a_cell_for_every_machine(ranks, recommended, tensorflow):
    table = advice_table(ranks)
    assert table.caption.startswith(f"Use {recommended} here ")
    assert f"; {tensorflow})" in table.caption
    assert table.html().count("◀ this machine") == 1


def test_stored_runs_are_listed_newest_first_with_repeats_together():
    old = stored(num_events=12, spec=spec("ddp"))
    new = stored("digits-2/ddp", 2e9, num_events=12, spec=spec("ddp"))
    table = runs_table([old, new, replace(new, repeat=1)])
    assert "3 stored runs, newest first" in table.text()
    assert table.to_frame()[["name", "runs", "batch", "steps"]].to_numpy().tolist() == [
        ["digits-2/ddp", 2, 256, 24],
        ["digits-1/ddp", 1, 256, 12],
    ]
    assert "No stored runs" in runs_table([]).text()
    assert runs_table([]).to_frame().empty


def test_progress_from_start_to_end():
    start, middle, end = (progress_of(fake_comparison(share=share)).text for share in (0, 0.6, 1))
    assert start == "single: starting"
    assert re.fullmatch(
        r"ddp: 40 % · [\d,]+ samples/s · loss \d\.\d+ \| run 3 of 4: \d s left, about \d+ s in all",
        middle,
    )
    assert end.startswith("async: finished · ")
    done = replace(fake_run("ddp", num_steps=20).snapshot(), status=Status.RUNNING)
    judged = replace(done, evaluating=Evaluating(2, 10, seconds=3.0))
    for run, text in (
        (run_of(spec("ddp"), created=1.0).snapshot(), "ddp: starting"),
        (done, "ddp: evaluating"),
        (judged, "evaluating 3 of 10 · 12 s left"),
    ):
        assert text in progress_of(fake_comparison(()).with_runs([run])).text


def reported(strategy: str, **changes: object) -> Run:
    """Return a run, with changes in the first rank's report."""
    run = fake_run(strategy, num_steps=30)
    run.add_report(replace(run.snapshot().reports[0], **changes))
    return run


def test_a_metric_that_is_nan_is_told_from_one_that_no_run_measured():
    runs = reported("ddp", held_out_metrics={"f1": math.nan}), fake_run("dp")
    table = results_table(compared(*runs))
    assert column_texts(table, "held-out f1") == ["NaN", "–"]


def heads(table: Table) -> set[str]:
    return {column.title for column in table.columns}


def test_what_communication_cost_is_in_the_table_where_it_is_known():
    comparison = fake_comparison(("single", "ddp"))
    table = results_table(comparison)
    assert {"exposed", "sent per step"} <= heads(table)
    assert re.search(r"^ddp .* 24 % +49 kB ", table.text(), re.MULTILINE)
    single, ddp = comparison.runs
    blind = replace(ddp, header=replace(ddp.header, sees_exposed=False))
    assert "exposed" not in heads(results_table(comparison.with_runs([single, blind])))
    alone = results_table(comparison.with_runs([single]))
    assert not {"exposed", "sent per step", "samples lost"} & heads(alone)


def test_lost_samples_and_unlike_memory_have_columns():
    ddp = Memory(4_000_000, 4_000_000, 4_000_000, 1_000_000)
    other = reported("async", num_lost_samples=640, memory=ddp._replace(optimizer=2_000_000))
    text = results_table(compared(reported("ddp", memory=ddp), other)).text()
    assert re.search(r"ddp .* 13 MB", text)
    assert re.search(r"async .* 640 +11 MB", text)
    assert "optimizer state and activations" in text
    computed = [reported(n, memory=Memory(s, s, s)) for n, s in (("ddp", 8_000), ("fsdp", 4_000))]
    assert runs_frame(compared(*computed))["memory_gradients"].tolist() == [8_000, 4_000]
    assert "(activations are not known)" in results_table(compared(*computed)).text()
    equal = [reported(name, memory=Memory(9)) for name in ("ddp", "dp")]
    assert "memory per rank" not in heads(results_table(compared(*equal)))


def test_when_a_target_was_reached_is_in_the_table_and_a_ceiling_never_misses_it():
    comparison = fake_comparison(("single", "no-comm", "ddp"))
    table = results_table(comparison, Target(value=0.5))
    assert [column.title for column in table.columns][1:3] == ["samples/s", "to loss 0.5"]
    assert re.search(r"ddp .* \d\.\d\d s \(\d\d\.\dk samples\)", table.text())
    low = Target(value=1e-9)
    assert "no-comm" in sentence(comparison, low)
    runs = [
        replace(run, spec=replace(run.spec, is_ceiling=run.name == "no-comm"))
        for run in comparison.runs
    ]
    found = comparison.with_runs(runs)
    assert "no-comm" not in sentence(found, low)
    assert column_texts(results_table(found, low), "to loss 1e-09") == ["never", "–", "never"]


def test_emulated_devices_are_named_wherever_results_are():
    runs = [fake_run("single").snapshot(), fake_run("ddp").snapshot()]
    given = {"devices": "2xV100", "as_": "resnet50", "device_link": "1Gbit,0.5ms"}
    over = [replace(run, spec=replace(run.spec, **given)) for run in runs]
    named = "2 emulated V100 running resnet50, over 1 Gbit/s and 0.5 ms"
    emulated, without = (Comparison(comparison_id="1", name="c", runs=r) for r in (over, runs))
    assert f"{named}; losses are real" in results_table(emulated).text()
    assert sentence(emulated).endswith(f"; times are computed for {named}.")
    assert "emulated" not in results_table(without).text() + sentence(without)
    assert list(runs_frame(emulated)["devices"]) == ["2xV100"] * 2


def column_texts(table: Table, title: str) -> list[str]:
    """Return the cells of a column, without their small print."""
    at = [each.title for each in table.columns].index(title)
    return [row[at].text for row in table.rows]


def test_efficiency_is_parted_but_not_by_a_ceiling_that_other_programs_have_slowed(monkeypatch):
    monkeypatch.setitem(STEP_SECONDS, "no-comm", 0.0140)
    table = results_table(fake_comparison(("single", "no-comm", "ddp")))
    at = [each.title for each in table.columns].index("efficiency")
    single, _, ddp = (row[at] for row in table.rows)
    assert single.quiet == ""
    machine, communication = (float(part.split()[0]) for part in ddp.quiet.split(" × "))
    whole = float(ddp.text.split()[0])
    assert whole / 100 == pytest.approx(machine * communication / 1e4, abs=0.02)
    monkeypatch.setitem(STEP_SECONDS, "no-comm", 0.0180)
    monkeypatch.setitem(STEP_SECONDS, "async", 0.0250)
    table = results_table(fake_comparison(("single", "no-comm", "dp", "ddp", "async")))
    *_, dp, ddp, async_ = (row[at] for row in table.rows)
    assert ddp.text.endswith(" %")
    assert not ddp.quiet
    assert all("×" in each.quiet for each in (dp, async_))
    assert "no-comm was slower than ddp, so efficiency cannot be split into" in table.text()
