"""The functions of an exported script, where they stand."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ddpnb.rank.script import general


def test_data_of_any_kind_is_loaded(monkeypatch):
    tree = {"x": (torch.arange(6).view(3, 2), [torch.zeros(3)]), "y": np.arange(3)}
    items = [{"n": n} for n in range(3)]
    kinds = [tree, items, DataLoader(items, collate_fn=len), (torch.ones(3), torch.ones(3))]
    found = []
    for made in kinds:
        monkeypatch.setattr(general, "data", lambda split, made=made: made)
        samples, collate = general.load("train")
        assert len(samples) == 3
        found.append(next(iter(DataLoader(samples, 2, collate_fn=collate))))
    assert found[0]["x"][0].tolist() == [[0, 1], [2, 3]]
    assert found[0]["y"].tolist() == found[1]["n"].tolist() == [0, 1]
    assert found[2] == 2
    assert [each.shape for each in found[3]] == [(2,), (2,)]


def test_a_scheduler_follows_each_step_and_is_part_of_the_checkpoint(monkeypatch):
    def optimizer(model, num_steps):
        made = torch.optim.SGD(model.parameters(), lr=1.0)
        return made, torch.optim.lr_scheduler.LinearLR(made, 1.0, 0.0, num_steps)

    monkeypatch.setattr(general, "optimizer", optimizer)
    optim, scheduler = general.own_optimizer(nn.Linear(1, 1), 4)
    optim.step()
    assert scheduler.get_last_lr() == [0.75]
    monkeypatch.setattr(general, "optimizer", lambda params: torch.optim.Adam(params))
    (optim,) = general.own_optimizer(nn.Linear(1, 1), 4)
    assert len(optim.param_groups[0]["params"]) == 2


def test_means_count_every_sample_alike(monkeypatch):
    batches = [
        (0.75, (torch.eye(3), torch.arange(3))),
        (0.25, (torch.eye(1, 3), torch.tensor([2]))),
    ]
    monkeypatch.setattr(
        general,
        "validation_step",
        lambda net, batch: (net(batch[0]).argmax(1) == batch[1]).float().mean(),
    )
    assert [*general.own_means(nn.Identity(), batches, general.pair_loss).values()] == [0.75]
    assert general.own_metric(nn.Identity(), batches, general.pair_loss)["metric"] == 0.75
    whole = (torch.cat([torch.eye(3), torch.eye(1, 3)]), torch.tensor([0, 1, 2, 2]))
    found = general.held_out_loss(nn.Identity(), batches, general.pair_loss)["loss"]
    assert found == pytest.approx(general.pair_loss(nn.Identity(), whole).item())
