"""An exported script trains under torchrun as the notebook did, also after a worker's death."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernel.client import Cell, Kernel

CELL = """%%ddp_compare {line} --no-baseline --seed 3 --name {name}
import os, signal
import torch
from pathlib import Path
from torch import nn

def model():
    return nn.Sequential(
        nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 10)
    )

def data(split):
    inputs = torch.randn(300, 64, generator=torch.Generator().manual_seed(4))
    few = slice(0, 205) if split == "train" else slice(205, 300)
    return inputs[few], inputs[few, :10].argmax(dim=1)

calls = 0

def loss(outputs, targets):
    global calls
    calls += outputs.requires_grad
    dying = Path("dying")
    if calls == 14 and int(os.environ["RANK"]) == 1 and dying.exists():
        dying.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(outputs, targets)
"""
STRATEGIES = ["ddp", "zero", "fsdp", "local-sgd:every=2"]  # its ranks also meet in step 14
HOOKS = ["ddp:hook=fp16", "ddp:hook=bf16,find_unused_parameters=on,bucket_cap_mb=0.001"]
OPTIONS = "--accumulate 2 --amp bf16 --clip 0.5 --momentum 0.9 --batch-per-worker 16 --jitter 1%"


def compare(kernel: Kernel, name: str, line: str, more: str = "") -> Cell:
    first, _, rest = CELL.partition("\n")
    cell = kernel.run(f"{first.format(name=name, line=line)}\n{rest}{more}", timeout=240)
    assert not cell.error, cell.error_text
    return kernel.run("import ddpnb")


@pytest.fixture(scope="module")
def compared(kernel_of_module: Kernel) -> Cell:
    line = f"{' '.join(STRATEGIES + HOOKS)} --epochs 2.5 --batch-size 40 --lr 0.2 --momentum 0.5"
    return compare(kernel_of_module, "plain", line)


def torchrun(kernel: Kernel, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a script of the notebook's folder with two processes, without ddpnb."""
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *words],
        cwd=kernel.folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )


def export(kernel: Kernel, words: str) -> str:
    cell = kernel.run(f"%ddp_export {words}")
    assert not cell.error, cell.error_text
    return cell.stdout


def losses(kernel: Kernel, name: str, strategy: str) -> list[float]:
    """Those of rank 0 in the notebook, then the final ones."""
    kernel.run(
        f"result = ddpnb.load({name!r})\nframe = result.steps()\n"
        f"frame = frame[(frame.strategy == {strategy!r}) & (frame['rank'] == 0)]\n"
        f"run = next(r for r in result.comparison.runs if r.name == {strategy!r}).reports[0]"
    )
    code = "__import__('json').dumps([*frame.loss, run.final_loss, run.held_out_loss])"
    found: list[float] = json.loads(kernel.value(code))
    return found


def printed(text: str) -> dict[int, float]:
    """The losses that a script has printed, by step."""
    return {
        int(n): float(x) for n, x in re.findall(r"^step (\d+) of \d+: loss ([\d.]+)", text, re.M)
    }


def finals(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"^(?:final training|held-out) loss ([\d.]+)", text, re.M)]


def assert_same(kernel: Kernel, name: str, strategy: str, text: str) -> None:
    """Compare every loss that a script has printed with the notebook's."""
    *steps, final, held_out = losses(kernel, name, strategy)
    assert printed(text) == pytest.approx(dict(enumerate(steps, start=1)), abs=1e-6)
    if not strategy.startswith("local-sgd"):  # its BatchNorm is estimated anew in the notebook
        assert finals(text) == pytest.approx([final, held_out], abs=1e-6)


@pytest.mark.parametrize("strategy", HOOKS)
def test_with_a_hook_it_has_the_losses_of_the_notebook(
    compared: Cell, kernel: Kernel, strategy: str
):
    file = f"{re.sub('[^a-z0-9]+', '-', strategy)}.py"
    export(kernel, f"plain {file} --strategy {strategy}")
    ended = torchrun(kernel, "--nproc-per-node", "2", file, "--log-every", "1")
    assert ended.returncode == 0, ended.stderr
    assert_same(kernel, "plain", strategy, ended.stdout)
    assert "ddpnb" not in (kernel.folder / file).read_text()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_worker_killed_costs_one_interval_and_no_loss_changes(
    compared: Cell, kernel: Kernel, strategy: str
):
    """Rank 1 dies in step 14; checkpoints are written every 6 steps, once an epoch."""
    file = f"killed-{strategy.partition(':')[0]}.py"
    export(kernel, f"plain {file} --strategy {strategy.partition(':')[0]}")
    (kernel.folder / "dying").touch()
    words = ("--max-restarts", "1", "--nproc-per-node", "2", file, "--log-every", "1")
    ended = torchrun(kernel, *words)
    assert ended.returncode == 0, ended.stderr
    assert not (kernel.folder / "dying").exists()
    before, _, after = ended.stdout.partition("going on after step 12, from ")
    assert max(printed(before)) == 13
    assert list(printed(after)) == [13, 14, 15]
    assert_same(kernel, "plain", strategy, ended.stdout)


SCHEDULED = """
def optimizer(model, num_steps):
    made = torch.optim.AdamW(model.parameters(), lr=0.05)
    marks = [num_steps // 3, 2 * num_steps // 3]
    return made, torch.optim.lr_scheduler.MultiStepLR(made, marks)
"""


def test_the_cells_own_scheduler_goes_on_after_a_death(compared: Cell, kernel: Kernel):
    line = "zero --epochs 2.5 --batch-size 40"
    compare(kernel, "scheduled", line, SCHEDULED)
    export(kernel, "scheduled scheduled.py")  # it trained zero alone
    (kernel.folder / "dying").touch()
    words = ("--max-restarts", "1", "--nproc-per-node", "2", "scheduled.py", "--log-every", "1")
    ended = torchrun(kernel, *words)
    assert ended.returncode == 0, ended.stderr
    assert "going on after step 12, from scheduled.pt" in ended.stdout
    assert_same(kernel, "scheduled", "zero", ended.stdout)


@pytest.fixture(scope="module")
def with_options(kernel_of_module: Kernel) -> Cell:
    names = " ".join(STRATEGIES[1:])
    return compare(kernel_of_module, "options", f"{names} --epochs 1.5 --lr 0.2 {OPTIONS}")


@pytest.mark.parametrize("strategy", STRATEGIES[1:])  # zero is ddp with another optimizer
def test_the_options_of_the_training_are_in_the_script(
    with_options: Cell, kernel: Kernel, strategy: str
):
    file = f"options-{strategy.partition(':')[0]}.py"
    shown = export(kernel, f"options {file} --strategy {strategy}")
    assert "also used --jitter: this script does not." in shown
    ended = torchrun(kernel, "--nproc-per-node", "2", file, "--log-every", "1")
    assert ended.returncode == 0, ended.stderr
    assert_same(kernel, "options", strategy, ended.stdout)


def test_the_lines_that_are_printed_run_it(compared: Cell, kernel: Kernel):
    shown = export(kernel, "plain lines.py --sbatch")
    kernel.run("import os; path = os.environ.pop('PATH')")
    alone = export(kernel, "plain alone.py")
    kernel.run("os.environ['PATH'] = path")
    assert alone.endswith(f"write  {sys.executable} -m torch.distributed.run  in its place.\n")
    lines = re.findall(r"^    (.*lines\.py)$", shown, re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["torchrun"] * 3 + ["python"]
    text = (kernel.folder / "lines.py").read_text()
    assert all(line in text for line in lines)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"
    _, _, two, older = (line.replace("HOST:29400", host) for line in lines)
    first, second = (shell(kernel, f"{two} --checkpoint two.pt") for _ in range(2))
    texts = [each.communicate(timeout=180) for each in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], texts
    final = finals(texts[0][0] + texts[1][0])
    ended = shell(kernel, f"{older} --checkpoint older.pt")
    out, error = ended.communicate(timeout=180)
    assert ended.returncode == 0, error
    *_, train, held_out = losses(kernel, "plain", "ddp")
    assert final == finals(out) == pytest.approx([train, held_out], abs=1e-6)


def shell(kernel: Kernel, line: str) -> "subprocess.Popen[str]":
    """Start a line in the notebook's folder, as one types it."""
    folders = f"{Path(sys.executable).parent}:{kernel.folder / 'bin'}:{os.environ['PATH']}"
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    return subprocess.Popen(
        ["bash", "-c", line],
        cwd=kernel.folder,
        env=environment | {"OMP_NUM_THREADS": "1", "PATH": folders},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("num_nodes", "expected"),
    [(1, "--nnodes 1 --nproc-per-node 2"), (2, "--nnodes 2 --nproc-per-node 1"), (3, "")],
)
def test_the_job_file_starts_torchrun_on_each_node(
    compared: Cell, kernel: Kernel, num_nodes: int, expected: str
):
    """Slurm's own commands are stood in for by two lines of shell; srun shows what it is given."""
    shown = export(kernel, "plain job.py --sbatch")
    assert "sbatch job.sbatch" in shown
    bin_folder = kernel.folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, code in (("srun", 'echo "$@"'), ("scontrol", "printf 'n1\\nn2\\n'")):
        (bin_folder / name).write_text(f"#!/bin/sh\n{code}\n")
        (bin_folder / name).chmod(0o700)
    slurm = f"SLURM_JOB_NUM_NODES={num_nodes} SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_ID=7"
    job = shell(kernel, f"{slurm} bash job.sbatch")
    out, error = job.communicate(timeout=60)
    if expected:
        assert expected in out, error
        assert "--rdzv-id 7 --rdzv-backend c10d --rdzv-endpoint n1:29400" in out
        assert out.endswith("--max-restarts 3 job.py --resume\n")
    else:
        assert job.returncode == 1
        assert error == "2 processes cannot be shared evenly by 3 nodes.\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("plain x.py --strategy async", "async cannot be a script: it needs ddpnb's own server"),
        ("plain x.py --strategy single", "take ddp, and start it with --nproc-per-node 1"),
        ("plain x.py --strategy no", "no strategy 'no'"),
        ("plain x.py --strategy fsdp:rank=2", "fsdp has no option 'rank'"),
        ("plain x.csv --strategy ddp", "--strategy goes with a script, e.g. train.py"),
        ("plain x --sbatch", "--sbatch goes with a script, e.g. train.py"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(
    compared: Cell, kernel: Kernel, words: str, expected: str
):
    cell = kernel.run(f"%ddp_export {words}")
    assert cell.error == "UserError"
    assert expected in cell.error_text


def test_tab_completes_the_strategies_that_can_be_written(compared: Cell, kernel: Kernel):
    offered = kernel.complete("%ddp_export plain train.py --strategy ")
    assert set(offered) == {"ddp", "zero", "fsdp", "local-sgd"}
    assert "ddp:hook=fp16" in kernel.complete("%ddp_export plain train.py --strategy ddp:hook=f")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("def random_state(): pass", "The cell defines random_state, which the script needs"),
        ("from random import random", "The cell defines random, which the script needs"),
        ("from torch.nn import *", "The cell imports * from torch.nn"),
    ],
)
def test_names_that_would_clash_are_refused(
    compared: Cell, kernel: Kernel, line: str, expected: str
):
    name = f"clash{len(line)}"
    compare(kernel, name, "ddp --epochs 0.2 --batch-size 40", line)
    assert expected in kernel.run(f"%ddp_export {name} clash.py").error_text


def test_what_differs_from_the_notebook_is_said(compared: Cell, kernel: Kernel):
    compare(kernel, "odd", "ddp --epochs 0.2 --batch-size 41")
    shown = export(kernel, "odd odd.py --strategy zero")
    assert "odd did not train zero" in shown
    assert "the script's is 40, and its losses differ." in shown
    text = (kernel.folder / "odd.py").read_text()
    assert "the script's is 40" in text
    assert "default=40" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--epochs 0", "--epochs, --batch-size and --save-every must be above 0"),
        ("--batch-size 41", "--batch-size 41 is not a multiple of the 2 processes."),
        ("--checkpoint there.pt --resume", "there.pt is no checkpoint of this script."),
        ("--checkpoint there.pt", "there.pt is there already: --resume goes on from it"),
    ],
)
def test_a_wrong_argument_of_the_script_is_one_sentence(
    compared: Cell, kernel: Kernel, words: str, expected: str
):
    export(kernel, "plain wrong.py")
    (kernel.folder / "there.pt").write_text("notes of the user's own")
    num = "2" if "batch" in words else "1"
    ended = torchrun(kernel, "--nproc-per-node", num, "wrong.py", *words.split())
    assert ended.returncode != 0
    assert expected in ended.stderr
    assert (kernel.folder / "there.pt").read_text() == "notes of the user's own"
