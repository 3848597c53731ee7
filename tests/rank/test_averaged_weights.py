"""Is a model of averaged weights judged with BatchNorm's statistics of these weights?"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpnb.protocol.messages import RunReport
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.tasks.base import Task
from ddpnb.rank.tasks.samples import TensorSamples
from ddpnb.rank.training.evaluation import BATCHNORM_NOTE, estimate_batchnorm
from tests.rank import sources
from tests.rank.ranks import make_state
from tests.rank.runs import header_of, spec_of, train_job

CELL = sources.CELL.replace("nn.ReLU()", "nn.BatchNorm1d(16), nn.ReLU()")
CELL = (
    CELL.replace("    x = torch", "    x = 5 + 3 * torch")
    .replace("> 0", "> 20")
    .replace("50", "100")
)


def trained(ranks, folder: Path, word: str, source: str = CELL) -> tuple[RunReport, list[str]]:
    """Train on two ranks; write the model."""
    spec = spec_of(word, source=source, models=str(folder), num_epochs=2)
    result = ranks(2).call(train_job, spec)[0]
    return result[0], [note for note in header_of(result).notes if note == BATCHNORM_NOTE]


def with_exact_statistics(folder: Path) -> tuple[nn.Module, float]:
    """Return the written model and its held-out loss with statistics of all training samples."""
    defined: dict = {}
    exec(CELL, defined)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        (inputs, _), (held_out, targets) = (defined["data"](split) for split in ("train", "test"))
    model = defined["model"]()
    model.load_state_dict(torch.load(folder / "run-1.pt", weights_only=True))
    hidden, scored = model[0](inputs), model[0](held_out)
    exact = (scored - hidden.mean(dim=0)) / (hidden.var(dim=0) + 1e-5).sqrt()
    outputs = model[3](torch.relu(exact * model[1].weight + model[1].bias))
    return model, nn.functional.cross_entropy(outputs, targets).item()


@pytest.mark.parametrize(
    ("word", "source"), [("local-sgd", CELL), ("diloco", CELL + sources.STEP), ("gossip", CELL)]
)
def test_averaged_weights_are_judged_with_their_own_statistics(ranks, tmp_path, word, source):
    """After 14 steps rank 0's own are still half those of its first weights."""
    report, notes = trained(ranks, tmp_path, word, source)
    model, exact = with_exact_statistics(tmp_path)
    assert report.held_out_loss == pytest.approx(exact, rel=0.05)
    assert notes == [BATCHNORM_NOTE]
    assert model[1].momentum == 0.1


@pytest.mark.parametrize("word", ["ddp", "async"])
def test_weights_that_a_worker_has_trained_with_keep_their_statistics(ranks, tmp_path, word):
    report, notes = trained(ranks, tmp_path, word)
    _, exact = with_exact_statistics(tmp_path)
    assert report.held_out_loss != pytest.approx(exact, rel=0.05)
    assert notes == []


def test_a_class_of_ones_own_says_whether_it_averages_weights():
    methods = dict.fromkeys(("setup", "step", "finish"), lambda self: None)
    for flag in (True, False):
        made = make_strategy("Own", {"Own": type("Own", (), methods | {"averages_weights": flag})})
        assert made.plan(make_state(0, 2)).averages_weights == flag


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


def test_a_step_that_takes_gradients_leaves_the_layers_that_it_does_not_use():
    def penalty(model, batch):
        inputs = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return slope.square().mean()

    model, inputs = Net(), torch.randn(33, 3, generator=torch.Generator().manual_seed(1)) + 1
    samples = TensorSamples((inputs, torch.zeros(len(inputs)).long()))
    task = Task(model=Net, train=samples, held_out=samples, step=penalty)
    estimate_batchnorm(model.eval(), task, torch.device("cpu"), batch_size=16, seed=0)
    torch.testing.assert_close(model.used.running_mean, inputs.mean(dim=0), atol=0.1, rtol=0)
    assert not model.unused.running_mean.any()
    mean, fails = model.used.running_mean.clone(), replace(task, step=lambda model, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        estimate_batchnorm(model, fails, torch.device("cpu"), batch_size=16, seed=0)
    assert torch.equal(model.used.running_mean, mean)
    assert (model.training, model.used.momentum) == (False, 0.1)
