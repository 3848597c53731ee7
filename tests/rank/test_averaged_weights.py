"""Is a model of averaged weights judged with BatchNorm's statistics of these weights?"""

from pathlib import Path

import pytest
import torch
from torch import nn

from ddpnb.rank.training.evaluation import BATCHNORM_NOTE
from tests import cells
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
