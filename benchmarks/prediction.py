"""Compares predicted steps (``%ddp_predict``) at 3 and 4 ranks with measured steps.

Each task is compared on two ranks: ``ddp``, with ``single`` and ``no-comm``.  Only from these runs
ddpnb predicts the steps on three and four ranks, which are then measured.  The benchmark takes less
than four minutes, on an idle machine.
"""

import statistics
import tempfile
import textwrap
from collections.abc import Iterator

from benchmarks.kernel import Kernel, kernel
from benchmarks.measure import Figure

SECONDS = 3
"""The length of each training."""
FITTED, PREDICTED = 2, (3, 4)
LIMIT = "<= 0.15"
"""The limit of the median error."""

MLP = textwrap.dedent(
    """
    import torch
    from torch import nn

    def model():
        return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
                             nn.Linear(1024, 10))

    def data(split):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(1400, 256, generator=generator)
        return inputs, torch.randint(0, 10, (1400,), generator=generator)
    """
)
TASKS = {
    "digits": "task='digits'",
    "synthetic": "task='synthetic:samples=1400'",
    "synthetic, more computing": "task='synthetic:samples=700,compute=2'",
    "MLP, 5 MB of gradients": f"source={MLP!r}",
}
"""The last batch of each task is smaller than 256, which shows the fixed costs of a step."""

PREPARE = """
import os
os.chdir({folder!r})
os.mkdir("data")
import ddpnb, json
"""
COMPARE = """
try:
    result = ddpnb.compare(
        "ddp", {task}, batch_size=256, baseline={baseline}, name={name!r},
        min_seconds={seconds}, eval_every=1000,
    )
    frame = result.runs().set_index("strategy")
    print(json.dumps(256 / frame.loc["ddp", "samples_per_second"]))
except Exception as error:
    raise SystemExit(f"{{error}}")
"""
PREDICT = """
points = ddpnb.predict({ranks!r}, strategies="ddp", run={name!r}).prediction.points["ddp"]
print(json.dumps([point.step_seconds for point in points]))
"""


def measure() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="ddpnb-bench-") as folder, kernel() as running:
        running.run(PREPARE.format(folder=folder))
        running.run("%load_ext ddpnb")
        running.run(f"%ddp_start -n {FITTED} --device cpu")
        running.run("ddpnb.advise()")
        for task in TASKS:
            _step(running, task, FITTED)
        wanted = {task: _predicted(running, task) for task in TASKS}
        found: dict[str, list[float]] = {task: [] for task in TASKS}
        for num_ranks in PREDICTED:
            running.run(f"%ddp_restart -n {num_ranks}")
            for task in TASKS:
                found[task].append(_step(running, task, num_ranks))
        running.run("%ddp_stop")
    errors: list[float] = []
    for task, steps in found.items():
        for num_ranks, wants, step in zip(PREDICTED, wanted[task], steps, strict=True):
            errors.append(abs(wants / step - 1))
            yield Figure(
                name=f"predicted and measured time of a step of ddp: {task} ({num_ranks} ranks)",
                unit="ms",
                ours=[1e3 * wants],
                theirs=[1e3 * step],
            )
    yield Figure(
        name="error of the predicted step time (median over tasks, 3 and 4 ranks)",
        unit="share",
        ours=errors,
        limit=LIMIT,
        note=f"mean {statistics.fmean(errors):.3f}",
    )


def _step(running: Kernel, task: str, num_ranks: int) -> float:
    source = COMPARE.format(
        task=TASKS[task],
        baseline=num_ranks == FITTED,
        name=_name(task, num_ranks),
        seconds=SECONDS,
    )
    return float(str(running.value(source.lstrip())))


def _predicted(running: Kernel, task: str) -> list[float]:
    ranks = ",".join(map(str, PREDICTED))
    found = running.value(PREDICT.format(ranks=ranks, name=_name(task, FITTED)))
    assert isinstance(found, list)
    return found


def _name(task: str, num_ranks: int) -> str:
    words = "".join(letter if letter.isalnum() else "-" for letter in task)
    return f"{words}-{num_ranks}"
