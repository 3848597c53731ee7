"""Does ``%ddp_predict``, fitted at 1 and 2 ranks, say how long a step takes at 3 and 4?

Each task is compared on two ranks: ``single`` and ``no-comm``, which run along, and ``ddp``.  From
that alone its steps on three and four ranks are predicted, as the machine is and over
emulated links, and then measured.  It takes under four minutes, on a machine that must do nothing
else.
"""

import statistics
import tempfile
import textwrap
from collections.abc import Iterator

from benchmarks.kernel import Kernel, kernel
from benchmarks.measure import Figure

SECONDS = 3
"""Of each training."""
FITTED, PREDICTED = 2, (3, 4)
LIMITS = {"": "<= 0.15", "link": "<= 0.10"}
"""Of the median error, as the machine is and over emulated links."""

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
"""Their last batches are smaller than 256, which shows what a step costs however small it is."""
LINKS = {"digits": "1Gbit,1ms", "MLP, 5 MB of gradients": "500Mbit,1ms"}

PREPARE = """
import os
os.chdir({folder!r})
os.mkdir("data")
import ddpnb, json
"""
COMPARE = """
%%local
try:
    result = ddpnb.compare(
        "ddp", {task}, {link} batch_size=256, baseline={baseline}, name={name!r},
        min_seconds={seconds}, eval_every=1000,
    )
    frame = result.to_frame().set_index("strategy")
    print(json.dumps(256 / frame.loc["ddp", "samples_per_second"]))
except Exception as error:
    raise SystemExit(f"{{error}}")
"""
PREDICT = """
points = ddpnb.predict({ranks!r}, strategies="ddp", run={name!r}).prediction.points["ddp"]
print(json.dumps([point.step_seconds for point in points]))
"""


def measure() -> Iterator[Figure]:
    cases = [(task, "") for task in TASKS] + list(LINKS.items())
    with tempfile.TemporaryDirectory(prefix="ddpnb-bench-") as folder, kernel() as running:
        running.run(PREPARE.format(folder=folder))
        running.run("%load_ext ddpnb")
        running.run(f"%ddp_start -n {FITTED} --device cpu")
        running.run("ddpnb.advise()")
        for task, link in cases:
            _step(running, task, link, FITTED)
        wanted = {case: _predicted(running, *case) for case in cases}
        found: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
        for num_ranks in PREDICTED:
            running.run(f"%ddp_restart -n {num_ranks}")
            for task, link in cases:
                found[task, link].append(_step(running, task, link, num_ranks))
        running.run("%ddp_stop")
    errors: dict[str, list[float]] = {"": [], "link": []}
    for (task, link), steps in found.items():
        for num_ranks, wants, step in zip(PREDICTED, wanted[task, link], steps, strict=True):
            errors["link" if link else ""].append(abs(wants / step - 1))
            over = f" over {link}" if link else ""
            yield Figure(
                name=f"a step of ddp, predicted and measured: {task}{over}, {num_ranks} ranks",
                unit="ms",
                ours=[1e3 * wants],
                theirs=[1e3 * step],
            )
    for kind, limit in LIMITS.items():
        where = "over emulated links" if kind else "as the machine is"
        yield Figure(
            name=f"error of the predicted step at 3 and 4 ranks, median over tasks, {where}",
            unit="share",
            ours=errors[kind],
            limit=limit,
            note=f"mean {statistics.fmean(errors[kind]):.3f}",
        )


def _step(running: Kernel, task: str, link: str, num_ranks: int) -> float:
    """Train, and return the seconds of a step of ``ddp``."""
    source = COMPARE.format(
        task=TASKS[task],
        link=f"link={link!r}," if link else "",
        baseline=num_ranks == FITTED,
        name=_name(task, link, num_ranks),
        seconds=SECONDS,
    )
    return float(str(running.value(source.lstrip())))


def _predicted(running: Kernel, task: str, link: str) -> list[float]:
    ranks = ",".join(map(str, PREDICTED))
    found = running.value(PREDICT.format(ranks=ranks, name=_name(task, link, FITTED)))
    assert isinstance(found, list)
    return found


def _name(task: str, link: str, num_ranks: int) -> str:
    words = "".join(letter if letter.isalnum() else "-" for letter in f"{task} {link}")
    return f"{words}-{num_ranks}"
