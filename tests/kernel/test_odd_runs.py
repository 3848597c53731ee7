"""Runs with little or nothing in them: one sentence or a picture, never a traceback."""

import re

import pytest

from tests.kernel.client import Kernel

EMPTY = """%%local
from ddpnb.history.comparison import Comparison
from ddpnb.history.model import Run, Status
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
for i in range({steps}):
    ddpnb.log(loss={loss}, samples={samples})
"""

LOSSES = {
    "nans": ODD.format(name="nans", steps=20, loss="math.nan", samples=4),
    "infinite": ODD.format(
        name="infinite", steps=20, loss="math.inf if i % 2 else -1.0", samples=4
    ),
    "late-nan": ODD.format(
        name="late-nan", steps=20, loss="1 / (i + 1) if i < 9 else math.nan", samples=4
    ),
    "one-step": ODD.format(name="one-step", steps=1, loss="0.5", samples=4),
    "no-samples": ODD.format(name="no-samples", steps=9, loss="0.5", samples=0),
    "negative": ODD.format(name="negative", steps=9, loss="-1.0 - i", samples=4),
    "huge": ODD.format(name="huge", steps=9, loss="10.0 ** (30 * i)", samples=4),
}


@pytest.fixture(scope="module", autouse=True)
def odd_runs(kernel_of_module: Kernel) -> None:
    """What the store holds: odd losses, nothing at all, two tasks."""
    for source in (*LOSSES.values(), EMPTY):
        cell = kernel_of_module.run(source)
        assert not cell.error, cell.error_text
    trained = kernel_of_module.run(
        "%ddp_compare ddp --task digits --epochs 0.3 --no-baseline --name of-digits\n"
        "%ddp_compare ddp --task synthetic --epochs 0.1 --no-baseline --amp bf16 --name of-noise\n"
        "%ddp_compare ddp --task digits --epochs 0.5 --lr 1e30 --no-baseline --name diverged",
        timeout=120,
    )
    assert not trained.error, trained.error_text


DRAWN = [*LOSSES, "empty", "empty/ddp", "diverged", "of-digits/ddp", "of-digits of-noise"]
DRAWN += ["of-noise nans empty", "nans infinite diverged empty"]


@pytest.mark.parametrize("options", ["", " --log --target 0.3 --x updates"])
@pytest.mark.parametrize("names", DRAWN)
def test_odd_runs_are_drawn_and_put_into_a_table(kernel: Kernel, names: str, options: str):
    cell = kernel.run(f"%ddp_plot {names}{options}")
    assert not cell.error, cell.error_text
    assert len(cell.bundles("image/png")) == len(cell.bundles("text/html")) == 1
    assert not cell.stderr


def test_what_differs_and_what_went_wrong_is_shown(kernel: Kernel):
    drawn = kernel.run("%ddp_plot of-digits of-noise").text
    # a busy machine judges fewer samples
    assert re.search(r"these runs differ in task, epochs(, eval samples)? and amp", drawn)
    assert "ddp: failed: nothing came" in kernel.run("%ddp_plot empty").text
    assert "NaN or infinite" in kernel.run("%ddp_plot diverged").text


@pytest.mark.parametrize("name", [*LOSSES, "empty", "diverged"])
def test_odd_runs_are_shown_in_full_and_exported(kernel: Kernel, name: str):
    cell = kernel.run(
        f"%ddp_runs --show {name}\n"
        + "\n".join(f"%ddp_export {name} odd.{kind}" for kind in KINDS)
        + f"\nimport ddpnb\nddpnb.load('{name}').to_frame().shape"
    )
    assert not cell.error, cell.error_text
    assert not cell.stderr
    for kind in KINDS:
        assert (kernel.folder / f"odd.{kind}").stat().st_size > 0


KINDS = ("csv", "runs.csv", "html", "png")


@pytest.mark.parametrize(
    "source",
    [
        "%ddp_plot not-there",
        "%ddp_plot of-digits not-there",
        "%ddp_plot of-digits/hogwild",
        "%ddp_runs --show not-there",
        "%ddp_export not-there odd.png",
        "%ddp_plot of-digits --x years",
        "%ddp_plot of-digits --target nan",
    ],
)
def test_what_is_not_there_is_one_sentence(kernel: Kernel, source: str):
    cell = kernel.run(source)
    assert cell.error == "UserError"
    assert len(cell.error_text.splitlines()) == 1
    assert not cell.bundles("image/png")
