"""Stored runs can be listed, shown in full, drawn, exported and deleted without a traceback,
even if a run has few steps or none."""

import re
import shutil
import sqlite3
import time
from pathlib import Path

import pytest

from tests.kernel.client import Cell, Kernel, kernel_in

EMPTY = """from ddpnb.results.comparison import Comparison
from ddpnb.results.run import Run, Status
from ddpnb.session.session import this_session
from ddpnb.protocol.messages import RunSpec
spec = RunSpec(run_id="empty-run", strategy="ddp", task="digits")
store = this_session().store
begun = store.begin_comparison(
    Comparison(comparison_id="empty-id", name="digits", task="digits", specs=(spec,)),
    wanted_name="empty",
)
store.begin_run(begun.comparison_id, Run(run_id=spec.run_id, name="ddp", spec=spec).snapshot())
store.finish(spec.run_id, Status.FAILED, "nothing came")
"""

ODD = """%%ddp --name {name}
import math, ddpnb
for i in range(1 if {name!r} == "one-step" else 9):
    ddpnb.log(loss={loss}, samples=4 * ({name!r} != "no-samples"))
"""

LOSSES = {
    "nans": "math.nan",
    "infinite": "math.inf if i % 2 else -1.0",
    "late-nan": "1 / (i + 1) if i < 5 else math.nan",
    "one-step": "0.5",
    "no-samples": "0.5",
    "negative": "-1.0 - i",
    "huge": "10.0 ** (30 * i)",
}


@pytest.fixture(scope="module", autouse=True)
def stored(kernel_of_module: Kernel) -> None:
    """Store runs with odd losses, an empty run, and runs of two tasks."""
    odd = [ODD.format(name=name, loss=loss) for name, loss in LOSSES.items()]
    for source in (*odd, EMPTY):
        assert kernel_of_module.run(source).passed
    assert kernel_of_module.run(
        "%ddp_compare ddp --task digits --epochs 0.3 --no-baseline --name of-digits\n"
        "%ddp_compare ddp --task synthetic --epochs 0.1 --no-baseline --amp bf16 --name of-noise\n"
        "%ddp_compare ddp --task digits --epochs 0.5 --lr 1e30 --no-baseline --name diverged",
        timeout=120,
    ).passed


COMBINED = ["of-digits of-noise", "of-noise nans empty", "nans infinite diverged empty"]
DRAWN = [*LOSSES, "empty", "empty/ddp", "diverged", "of-digits/ddp", *COMBINED]
KINDS = ("html", "png", "svg")


def test_odd_runs_are_drawn_and_put_into_a_table(kernel: Kernel):
    """``test_odd_runs_are_shown_in_full_and_exported`` draws each run without options."""
    lines = [f"%ddp_plot {names}" for names in COMBINED]
    lines += [f"%ddp_plot {names} --log --target 0.3" for names in DRAWN]
    cell = kernel.run("\n".join(lines)).passed
    found = [len(cell.bundles(m)) for m in ("image/png", "text/html")]
    assert found == [len(lines), 2 * len(lines)]
    assert not cell.stderr


def test_what_differs_and_what_went_wrong_is_shown(kernel: Kernel):
    drawn = kernel.run("%ddp_plot of-digits of-noise").text
    # a busy machine evaluates fewer samples
    assert re.search(r"these runs differ in task, epochs(, eval samples)? and amp", drawn)
    assert "nothing came" in kernel.run("%ddp_plot empty").text
    assert "NaN" in kernel.run("%ddp_plot diverged").text


def test_odd_runs_are_shown_in_full_and_exported(kernel: Kernel):
    for number, name in enumerate((*LOSSES, "empty", "diverged")):
        kinds = ("csv", "runs.csv", KINDS[number % 3])
        lines = [f"%ddp_export {name} {name}.{kind}" for kind in kinds[1:]]
        twins = f"import ddpnb\nddpnb.load('{name}').runs().shape\n"
        twins += f"ddpnb.export('{name}', path='{name}.csv')"
        cell = kernel.run("\n".join([f"%ddp_runs --show {name}", *lines, twins])).passed
        assert not cell.stderr
        assert all((kernel.folder / f"{name}.{kind}").stat().st_size > 0 for kind in kinds)


def test_runs_are_listed_by_what_they_are_and_shown_with_all_that_repeats_them(kernel: Kernel):
    assert re.search(r"^of-digits/ddp ", kernel.run("%ddp_runs of-d").text, re.MULTILINE)
    for words in ("of-d", "--last 1"):
        assert "of-noise/ddp" not in kernel.run(f"%ddp_runs {words}").text
    cell = kernel.run("%ddp_runs --show of-digits").passed
    magic = "%ddp_compare ddp --task digits --epochs 0.3 --batch-size 256 --lr 0.05 --momentum 0 "
    assert magic in cell.text
    assert magic in cell.bundles("text/html")[0]
    for what in ("torch ", "python ", "CPU ", "GPUs ", "threads of each rank ", "backend gloo"):
        assert f"\n{what}" in re.sub(" +", " ", cell.text)


def test_deleting_is_said(kernel: Kernel):
    assert kernel.run("%ddp_runs --delete of-noise").lines == ["Deleted of-noise/ddp#1."]
    assert "of-noise/ddp" not in kernel.run("%ddp_runs").text
    assert kernel.run("%ddp_runs --delete of-noise").error == "UserError"


DAMAGE = """
import sqlite3
import time
from ddpnb.session.session import this_session
with sqlite3.connect(this_session().store.folder / "runs.sqlite3") as connection:
    connection.execute(
        "UPDATE runs SET detail = ?, {} WHERE rowid = (SELECT max(rowid) FROM runs)",
        ("\x1b[31mred\x1b[0m",),
    )
connection.close()
"""


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ("spec = 'no JSON'", "unreadable: the spec is damaged"),
        ("created = 'yesterday'", "unreadable: the created is damaged"),
        ("status = 'bogus'", "unreadable: the status is damaged"),
        ("id = '../../../victim'", "red"),
    ],
)
def test_a_damaged_run_is_named_and_hides_no_other_run(kernel: Kernel, change: str, shown: str):
    assert kernel.run(ODD.format(name="stranger", loss="0.5")).passed
    (kernel.folder / "data/runs/models").mkdir(exist_ok=True)
    victim = kernel.folder / "victim.pt"
    victim.touch()
    assert kernel.run(DAMAGE.format(change)).passed
    listed = kernel.run("%ddp_runs").passed
    assert shown in listed.text
    assert "of-digits/ddp" in listed.text
    drawn = kernel.run("%ddp_runs --show stranger\n%ddp_plot stranger\n%ddp_plot").passed
    plain = [*listed.bundles("text/plain"), *drawn.bundles("text/plain")]
    assert len(plain) >= 4
    assert "\x1b" not in "".join(plain)
    deleted = kernel.run("%ddp_runs --delete stranger").passed
    assert deleted.stdout.startswith("Deleted stranger/")
    assert victim.exists()


def training(kernel: Kernel, name: str, num_epochs: int) -> tuple[Cell, sqlite3.Connection]:
    """Begin a comparison, and return it with a connection to the store as soon as steps are in."""
    command = "%ddp_compare ddp --task digits --slow 0:5ms,1:5ms --no-baseline"
    cell = kernel.begin(f"{command} --epochs {num_epochs} --name {name}")
    file = kernel.folder / "data/runs/runs.sqlite3"
    kernel.wait_until(lambda: cell.num_updates > 0 and file.exists())
    other = sqlite3.connect(file, isolation_level=None)
    wanted = "SELECT count(*) FROM batches JOIN runs ON run = id WHERE status = 'running'"
    while other.execute(wanted).fetchone() == (0,):
        time.sleep(0.05)
    return cell, other


def test_a_locked_store_is_written_after_the_interrupt(kernel: Kernel):
    kernel.run("import ddpnb")
    cell, other = training(kernel, "locked", 500)
    other.execute("BEGIN EXCLUSIVE")
    kernel.interrupt()
    assert kernel.wait(cell).error == "KeyboardInterrupt", cell.text
    other.execute("COMMIT")
    other.close()
    kernel.wait_for_value("ddpnb.runs('locked').text()", "stopped: interrupted")


def test_a_comparison_ends_well_after_its_folder_is_removed(tmp_path: Path):
    folder = tmp_path / "notebook"
    folder.mkdir()
    with kernel_in(folder) as kernel:
        kernel.run("import ddpnb\n%ddp_start -n 2 --device cpu")
        cell, other = training(kernel, "removed", 10)
        shutil.rmtree(folder)
        other.close()
        assert kernel.wait(cell, timeout=120).passed
        assert cell.stderr.count("The runs cannot be saved") == 1, cell.stderr
        assert "finished" in kernel.value("ddpnb.runs('removed').text()")
