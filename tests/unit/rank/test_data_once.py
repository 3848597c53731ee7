"""``data(split)`` runs once in a comparison, and every run has what it has left."""

import pytest
import torch

from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.tasks import load_task
from ddpnb.rank.tasks.base import Task
from ddpnb.rank.tasks.samples import DataCache

CELL = """
import functools
import torch
from torch import nn
from torch.utils.data import DataLoader

calls.append("cell")
vocabulary, order, known, size, mean = {}, [], set(), None, None

class Tokenizer:
    def __init__(self): self.vocabulary = vocabulary

tokenizer = Tokenizer()

class Rows:
    def __init__(self):
        self.inputs, self.generator = torch.randn(20, 4), torch.Generator().manual_seed(1)
        self.vocabulary, self.cache = vocabulary, {}
    def __len__(self): return len(self.inputs)
    def __getitem__(self, number):
        self.cache[number] = True
        return self.inputs[number], torch.randint(1000, (), generator=self.generator)

def fill(split):
    vocabulary[split] = len(vocabulary)
    order.append(split)
    known.add(split)

@functools.lru_cache
def data(split):
    global size, mean
    calls.append(split)
    fill(split)
    rows = Rows()
    size, mean = len(order), rows.inputs.mean()
    return DataLoader(rows, batch_size=4)

def model():
    return nn.Linear(4, len(vocabulary))
"""
ALL = torch.arange(20)


@pytest.fixture
def calls() -> list[str]:
    return []


def loaded(source: str, calls: list[str], cache: DataCache, comparison: str = "c") -> Task:
    spec = RunSpec(run_id="r", strategy="ddp", comparison=comparison, source=source)
    return load_task(spec, {"calls": calls}, "cell", cache)


def test_every_run_sees_what_data_has_left_in_names_of_the_cell(calls: list[str]):
    cache: DataCache = {}
    first, second, third = (loaded(CELL, calls, cache) for _ in range(3))
    assert calls == ["cell", "train", "test", "cell", "cell"]
    for task in (first, second, third):
        names = task.defined
        assert names["vocabulary"] == {"train": 0, "test": 1}
        assert (names["order"], names["known"]) == (["train", "test"], {"train", "test"})
        assert (names["size"], names["mean"]) == (2, task.held_out.dataset.inputs.mean())
        assert task.model().out_features == 2
        assert names["tokenizer"].vocabulary is names["vocabulary"]
        assert task.train is first.train
        assert task.held_out is first.held_out
    first.defined["vocabulary"]["more"] = 2
    assert loaded(CELL, calls, cache).defined["vocabulary"] == {"train": 0, "test": 1}
    assert loaded(CELL, calls, cache, "next").defined["size"] == 2
    assert calls[-3:] == ["cell", "train", "test"]


def test_an_error_in_data_is_the_users(calls: list[str]):
    cache: DataCache = {}
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            loaded(CELL.replace("    rows = ", "    1 / 0\n    rows = "), calls, cache)
