"""``data(split)`` runs once in a comparison, and every run starts from what it has left."""

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
    cache = DataCache()
    first, second, third = (loaded(CELL, calls, cache) for _ in range(3))
    assert calls == ["cell", "train", "test", "cell", "cell"]
    for task in (first, second, third):
        names = task.defined
        assert names["vocabulary"] == {"train": 0, "test": 1}
        assert (names["order"], names["known"]) == (["train", "test"], {"train", "test"})
        assert (names["size"], names["mean"]) == (2, task.held_out.dataset.inputs.mean())
        assert task.model().out_features == 2
        holders = names["tokenizer"], task.train.dataset, task.held_out.dataset
        assert all(holder.vocabulary is names["vocabulary"] for holder in holders)
        assert type(task.train.dataset) is names["Rows"]
    first.defined["vocabulary"]["more"] = 2
    assert loaded(CELL, calls, cache).defined["vocabulary"] == {"train": 0, "test": 1}
    assert loaded(CELL, calls, cache, "next").defined["size"] == 2
    assert calls[-3:] == ["cell", "train", "test"]


def test_no_run_pays_for_or_draws_from_the_state_of_another(calls: list[str]):
    cache = DataCache()
    tasks = [loaded(CELL, calls, cache) for _ in range(3)]
    for task in tasks:
        assert len(task.train.dataset.cache) == 1  # the item that is tried
    drawn = [task.train.fetch(ALL)[1].tolist() for task in tasks]
    assert drawn[0] == drawn[1] == drawn[2]
    memory = {task.train.dataset.inputs.data_ptr() for task in tasks}
    assert len(memory) == 1
    assert len(loaded(CELL, calls, cache).train.dataset.cache) == 1


def test_what_cannot_be_copied_is_loaded_anew_by_each_run(calls: list[str]):
    locked = CELL.replace("self.vocabulary, ", "self.lock, self.vocabulary, ").replace(
        "= vocabulary, {}", "= threading.Lock(), vocabulary, {}"
    )
    unreadable = CELL.replace(
        "    def __len__",
        "    def __setstate__(self, state): raise OSError('gone')\n    def __len__",
    )
    for source in ("import threading\n" + locked, unreadable):
        calls.clear()
        cache = DataCache()
        tasks = [loaded(source, calls, cache) for _ in range(3)]
        assert calls == 3 * ["cell", "train", "test"]
        for task in tasks:
            assert task.defined["vocabulary"] == {"train": 0, "test": 1}
            assert len(task.train.dataset.cache) == 1


def test_an_error_in_data_is_the_users(calls: list[str]):
    cache = DataCache()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            loaded(CELL.replace("    rows = ", "    1 / 0\n    rows = "), calls, cache)
