"""Each built-in task has the data and the model that its help describes."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.tasks import load_task, text
from ddpnb.rank.tasks.base import Task
from ddpnb.rank.tasks.samples import Samples, TensorSamples
from ddpnb.rank.training.evaluation import score


def load(task: str) -> Task:
    return load_task(RunSpec(run_id="r", strategy="ddp", task=task), {}, "")


def scored(samples: Samples, **changes):
    """Return measures of the samples' inputs, as if they were a model's outputs."""
    task = Task(model=nn.Identity, train=samples, held_out=samples, **changes)
    return score(nn.Identity(), task, torch.device("cpu"))[0]


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits  # takes a second
    from sklearn.model_selection import train_test_split

    task, known = load("digits"), load_digits()
    split = train_test_split(range(1797), test_size=0.2, random_state=0, stratify=known.target)
    for samples, indexes in zip((task.train, task.held_out), split, strict=True):
        images, targets = samples.fetch(torch.arange(len(samples)))
        assert torch.equal(images[:, 0], torch.tensor(known.images[indexes] / 16).float())
        assert torch.equal(targets, torch.tensor(known.target[indexes]))


def test_text_is_read_from_the_standard_library_and_split_by_file():
    task = load("text")
    assert not set(text.TRAIN_FILES) & set(text.HELD_OUT_FILES)
    inputs, targets = task.train.fetch(torch.tensor([0, 1]))
    assert torch.equal(inputs[0, 1:], targets[0, :-1])
    assert targets[0, -1] == inputs[1, 0]
    read = "".join(chr(32 + symbol) if symbol < 95 else "\n" for symbol in inputs[0].tolist())
    first = Path(text.sysconfig.get_paths()["stdlib"], text.TRAIN_FILES[0])
    assert first.read_text().startswith(read)


def test_the_transformer_sees_nothing_of_what_comes():
    model = text.Transformer().eval()
    inputs = torch.randint(text.NUM_SYMBOLS, (2, text.CONTEXT))
    changed = inputs.clone()
    changed[:, 40:] = 0
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[..., :40], after[..., :40])
    assert not torch.equal(before[..., 40:], after[..., 40:])


def test_every_sample_counts_alike_whatever_its_batch():
    scores, targets = torch.zeros(600, 3), torch.zeros(600, dtype=torch.int64)
    scores[512:, 0] = 5.0
    found = scored(TensorSamples((scores, targets)))
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(scores, targets).item())


@pytest.mark.parametrize(
    "targets", [torch.tensor([0, 1, -100]), torch.eye(3)], ids=["ignored", "probabilities"]
)
def test_targets_that_are_no_class_numbers_have_a_loss_and_no_accuracy(targets):
    outputs = torch.randn(3, 3)
    found = scored(TensorSamples((outputs, targets)))
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, targets).item())
    assert math.isnan(found["accuracy"])


@pytest.mark.parametrize(("parameters", "size"), [(0, 34_826), (5, 34_826), (2_500_000, 2_500_000)])
def test_synthetic_models_have_as_many_parameters_as_asked_for(parameters, size):
    task = load(f"synthetic:parameters={parameters},compute=4,samples=64")
    model = task.model()
    assert (size_of(model), len(task.train)) == (size, 64)
    task.step(model, task.train.fetch(torch.arange(4))).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
