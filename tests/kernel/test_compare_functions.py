"""``ddpnb.compare`` with the notebook's functions or a file, and the models that it returns."""

import pytest

from tests.kernel.client import Kernel

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
def compared(kernel_of_module: Kernel) -> Kernel:
    """A kernel that compared its functions. The ranks have other variables of the same names."""
    kernel = kernel_of_module
    kernel.run("%%ddp\nX, WIDTH, labels = 'mine', None, 0\nclass Net: pass")
    assert kernel.run(f"import ddpnb\n{DEFINED}").passed
    assert kernel.run(
        f"result = {COMPARE.format(repr('ddp') + ', ' + FUNCTIONS)}", timeout=120
    ).passed
    return kernel


def test_functions_travel_with_the_names_that_they_use(compared: Kernel):
    assert compared.value("list(result.runs().status)") == "['finished']"
    assert compared.value("'held_out_right' in result.runs() or list(result.runs())")
    assert compared.value("result.comparison.source.count('def load')") == "1"
    assert compared.run("%ddp_pull (X, WIDTH, labels) --ranks 0 --as own").error == ""
    assert compared.value("own") == "('mine', None, 0)"


def test_the_trained_model_comes_to_the_notebook(compared: Kernel):
    compared.run("model = result.model('ddp')")
    assert compared.value("isinstance(model, Net), model.label()") == "True mine"
    score = "right(model(X[128:192]), labels(X[128:192]))['right']"
    held_out = "result.comparison.runs[-1].reports[0].held_out_metrics['right']"
    assert compared.value(f"abs({score} - {held_out}) < 1e-6") == "True"
    assert "choose one of: ddp" in compared.run("result.model('single')").error_text


def test_every_strategys_model_is_the_one_that_was_judged(kernel: Kernel):
    (kernel.folder / "cell.py").write_text(FILE)
    names = ["ddp", "dp", "fsdp", "async", "local-sgd"]
    call = COMPARE.format(", ".join(map(repr, [*names, "single"])) + ", source='cell.py'")
    assert kernel.run(f"import ddpnb\nmany = {call}", timeout=300).passed
    kernel.run(DEFINED)
    for name in [*names, "single"]:
        score = f"right(many.model({name!r})(X[128:192]), labels(X[128:192]))['right']"
        run = f"next(run for run in many.comparison.runs if run.name == {name!r})"
        held_out = f"{run}.reports[0].held_out_metrics['right']"
        assert kernel.value(f"abs({score} - {held_out}) < 1e-6") == "True", name


def test_the_next_comparison_takes_the_models_place(kernel: Kernel):
    (kernel.folder / "cell.py").write_text(FILE)
    call = COMPARE.format("'ddp', source='cell.py'")
    kernel.run(f"import ddpnb\nfirst = {call}\nsecond = {call}", timeout=120)
    assert kernel.value("type(second.model('ddp')).__name__") == "Net"
    assert kernel.run("first.model('ddp')").error == "UserError"
    assert kernel.run("ddpnb.load('functions').model('ddp')").error == "UserError"


def test_a_rank_that_is_started_anew_has_the_functions_too(compared: Kernel):
    arguments = f"'ddp', 'zero', {FUNCTIONS}, epochs=2000, kill='1@0.2s', batch_size=32"
    assert compared.run(f"killed = ddpnb.compare({arguments}, baseline=False)", timeout=120).passed
    headers = "[run.header is not None for run in killed.comparison.runs]"
    assert compared.value(headers) == "[True, True]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("model=Net", ["data="]),
        ("data=load", ["model="]),
        ("model=Net, data=7", ["data=", "an int"]),
        ("model=Net, data=load, source='x = 1'", ["source=", "model="]),
        ("source='no_such.py'", ["no_such.py"]),
    ],
)
def test_a_bad_combination_is_one_sentence(compared: Kernel, arguments: str, words: list[str]):
    refusal = compared.run(COMPARE.format(f"'ddp', {arguments}")).refusal
    assert all(word in refusal for word in words), refusal
