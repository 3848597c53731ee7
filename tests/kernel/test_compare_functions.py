"""``ddpnb.compare`` with functions of the notebook, or a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.client import Cell, Kernel

DEFINED = """
import torch
from torch import nn

WIDTH = 4
X = torch.randn(20_000, WIDTH, generator=torch.Generator().manual_seed(0))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 2)
        self.label = lambda: "mine"

    def forward(self, inputs):
        return self.first(inputs)

def labels(inputs):
    return (inputs.sum(1) > 0).long()

def load(split):
    part = X[:128] if split == "train" else X[128:192]
    return part, labels(part)

def entropy(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)

def right(outputs, targets):
    return {"right": (outputs.argmax(1) == targets).float().mean().item()}

def adam(params):
    return torch.optim.Adam(params, lr=0.02)
"""
COMPARE = "ddpnb.compare({}, epochs=4, batch_size=32, baseline=False, name='functions')"
FUNCTIONS = "model=Net, data=load, loss=entropy, metric=right, optimizer=adam"
FILE = DEFINED + "\nmodel, data, loss, metric, optimizer = Net, load, entropy, right, adam\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "data").mkdir()
    return folder


@pytest.fixture(scope="module")
def kernel(project: Path) -> Iterator[Kernel]:
    """A kernel of its own, for it imports torch, and other tests check that none does."""
    kernel = Kernel(project)
    kernel.run("%load_ext ddpnb\n%ddp_start -n 2 --device cpu")
    yield kernel
    kernel.stop()


@pytest.fixture(scope="module")
def compared(kernel: Kernel) -> Kernel:
    """The kernel with a comparison of its functions, on ranks with names of their own."""
    kernel.run("%%ddp\nX, WIDTH, labels = 'mine', None, 0\nclass Net: pass")
    assert not kernel.run(f"import ddpnb\n{DEFINED}").error
    cell = kernel.run(f"result = {COMPARE.format(repr('ddp') + ', ' + FUNCTIONS)}", timeout=120)
    assert not cell.error, cell.error_text
    return kernel


def test_functions_travel_with_the_names_that_they_use(compared: Kernel):
    assert compared.value("list(result.to_frame().status)") == "['finished']"
    assert compared.value("'held_out_right' in result.to_frame() or list(result.to_frame())")
    assert compared.value("result.comparison.source.count('def load')") == "1"


def test_the_ranks_own_names_stay(compared: Kernel):
    assert compared.run("%ddp_pull (X, WIDTH, labels) --ranks 0 --as own").error == ""
    assert compared.value("own") == "('mine', None, 0)"


def test_every_strategys_saved_weights_are_those_that_were_judged(kernel: Kernel, project: Path):
    (project / "cell.py").write_text(FILE)
    names = ["ddp", "dp", "ddp-shm", "zero", "fsdp", "async", "local-sgd", "gossip", "hogwild"]
    call = COMPARE.format(
        ", ".join(map(repr, [*names, "single"])) + ", source='cell.py', save=True"
    )
    cell = kernel.run(f"import ddpnb\nmany = {call}", timeout=300)
    assert not cell.error, cell.error_text
    kernel.run(f"{DEFINED}\nnet = Net()")
    for name in [*names, "single"]:
        run = f"next(run for run in many.comparison.runs if run.name == {name!r})"
        kernel.run(f"net.load_state_dict(torch.load({run}.spec.model_file))")
        score = "right(net(X[128:192]), labels(X[128:192]))['right']"
        held_out = f"{run}.reports[0].held_out_metrics['right']"
        assert kernel.value(f"abs({score} - {held_out}) < 1e-6") == "True", name


def test_a_rank_that_is_started_anew_has_the_functions_too(compared: Kernel):
    arguments = f"'ddp', 'zero', {FUNCTIONS}, epochs=2000, kill='1@0.2s', batch_size=32"
    cell = compared.run(f"killed = ddpnb.compare({arguments}, baseline=False)", timeout=120)
    assert not cell.error, cell.error_text
    headers = "[run.header is not None for run in killed.comparison.runs]"
    assert compared.value(headers) == "[True, True]"


def test_a_rank_that_joins_again_has_the_functions_too(compared: Kernel):
    arguments = f"'async', {FUNCTIONS}, epochs=4000, kill='1@0.3s', batch_size=32, eval_every=0"
    cell = compared.run(f"killed = ddpnb.compare({arguments}, baseline=False)", timeout=120)
    assert not cell.error, cell.error_text
    assert "came back" in compared.value("[m.kind.value for m in killed.comparison.runs[0].marks]")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("model=Net", ["data="]),
        ("data=load", ["model="]),
        ("loss=entropy", ["model="]),
        ("model=Net, data=7", ["data=", "an int"]),
        ("model=Net, data=load, source='x = 1'", ["source=", "model="]),
        ("model=Net, data=load, task='digits'", ["task=", "model="]),
        ("source='no_such.py'", ["no_such.py"]),
    ],
)
def test_a_bad_combination_is_one_sentence(compared: Kernel, arguments: str, words: list[str]):
    cell: Cell = compared.run(COMPARE.format(f"'ddp', {arguments}"))
    assert cell.error == "UserError"
    assert all(word in cell.error_text for word in words), cell.error_text
    assert len(cell.error_text.splitlines()) == 1
