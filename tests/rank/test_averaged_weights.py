"""Is a model of averaged weights judged with BatchNorm's statistics of these weights?"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.tasks.base import Task
from ddpnb.rank.tasks.samples import TensorSamples
from ddpnb.rank.training.evaluation import BATCHNORM_NOTE, estimate_batchnorm
from tests import cells
from tests.rank.ranks import make_state
from tests.rank.runs import header_of, spec_of, train_job

CELL = (
    cells.CELL.replace("nn.ReLU()", "nn.BatchNorm1d(16), nn.ReLU()")
    .replace("    x = torch", "    x = 5 + 3 * torch")
    .replace("> 0", "> 20")
    .replace("50", "100")
)


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
    ("word", "source", "is_averaged"),
    [
        ("local-sgd", CELL, True),
        ("diloco", CELL + cells.STEP, True),
        ("gossip", CELL, True),
        ("ddp", CELL, False),
        ("async", CELL, False),
    ],
)
def test_averaged_weights_alone_are_judged_with_their_own_statistics(
    ranks, tmp_path, word, source, is_averaged
):
    """After 14 steps rank 0's own are still half those of its first weights."""
    spec = spec_of(word, source=source, models=str(tmp_path), num_epochs=2)
    result, _ = ranks(2).call(train_job, spec)
    model, exact = with_exact_statistics(tmp_path)
    assert (result[0].held_out_loss == pytest.approx(exact, rel=0.05)) == is_averaged
    assert (BATCHNORM_NOTE in header_of(result).notes) == is_averaged
    assert model[1].momentum == 0.1


def test_a_class_of_ones_own_says_whether_it_averages_weights():
    methods = dict.fromkeys(("setup", "step", "finish"), lambda self: None)
    for flag in (True, False):
        made = make_strategy("Own", {"Own": type("Own", (), methods | {"averages_weights": flag})})
        assert made.plan(make_state(0, 2)).averages_weights == flag


def test_a_step_that_takes_gradients_leaves_the_layers_that_it_does_not_use():
    def penalty(model, batch):
        inputs = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model[0](inputs).sum(), inputs, create_graph=True)
        return slope.square().mean()

    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    inputs = torch.randn(33, 3, generator=torch.Generator().manual_seed(1)) + 1
    samples = TensorSamples((inputs, torch.zeros(len(inputs)).long()))
    task = Task(model=nn.Identity, train=samples, held_out=samples, step=penalty)
    estimate_batchnorm(model.eval(), task, torch.device("cpu"), batch_size=16, seed=0)
    torch.testing.assert_close(model[0].running_mean, inputs.mean(dim=0), atol=0.1, rtol=0)
    assert not model[1].running_mean.any()
    mean, fails = model[0].running_mean.clone(), replace(task, step=lambda model, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        estimate_batchnorm(model, fails, torch.device("cpu"), batch_size=16, seed=0)
    assert torch.equal(model[0].running_mean, mean)
    assert (model.training, model[0].momentum) == (False, 0.1)
