"""Processes that prefetch yield the same samples, and end with the run."""

import multiprocessing
import os
import signal
import time
from contextlib import closing

import psutil
import pytest
import torch

from ddpnb.protocol.messages import RunHeader, RunSpec, StepEvent
from ddpnb.rank.tasks.batches import Shard
from ddpnb.rank.tasks.samples import DatasetSamples
from ddpnb.rank.training import loop
from ddpnb.rank.training.context import build_context, prefetching

CELL = """
import os
import torch
from torch import nn
from torch.utils.data import Dataset

class Own(Dataset):
    def __init__(self, num):
        self.inputs = torch.randn(num, 4)
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, i):
        return self.inputs[i], int(self.inputs[i].sum() > 0)

def model():
    return nn.Linear(4, 2)

def data(split):
    return Own(100 if split == "train" else 20)
"""
FAILING = CELL.replace("return self.inputs[i],", "return self.inputs[i // (i != 77)],")


def spec_of(strategy: str, **changes) -> RunSpec:
    values = {"run_id": "run-1", "source": CELL, "num_epochs": 3, "batch_size": 20}
    return RunSpec(strategy=strategy, **values | {"num_data_workers": 2} | changes)


def loading_job(state, folder, spec, after=None):
    """Train; return the events, the most processes that there were, how many are left."""
    multiprocessing.current_process()._config["daemon"] = False  # else it may have no children
    events, most = [], 0
    before = len(psutil.Process().children())

    def publish(event):
        nonlocal most
        events.append(event)
        most = max(most, len(psutil.Process().children()) - before)
        if after is not None and len(events) == 5:
            after()

    failed = ""
    try:
        loop.run(
            spec,
            state=state,
            folder=folder,
            publish=publish,
            namespace={},
            should_stop=lambda: False,
        )
    except BaseException as error:  # noqa: BLE001  # the test judges it
        failed = f"{type(error).__name__}: {error}"
    deadline = time.monotonic() + 20
    while len(psutil.Process().children()) > before and time.monotonic() < deadline:
        time.sleep(0.05)
    return events, most, len(psutil.Process().children()) - before, failed


def losses(result) -> list[float]:
    return [event.loss for event in result[0] if isinstance(event, StepEvent)]


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp"])
def test_samples_and_their_order_are_the_same(ranks, strategy):
    direct = ranks(2).call(loading_job, spec_of(strategy, num_data_workers=0))
    ahead = ranks(2).call(loading_job, spec_of(strategy))
    assert [losses(result) for result in ahead] == [losses(result) for result in direct]
    assert len(losses(ahead[0])) == 15
    took_part = ahead[:1] if strategy in ("single", "dp") else ahead
    for _, most, left, failed in took_part:
        assert (most, left, failed) == (2, 0, "")


@pytest.mark.parametrize("strategy", ["async", "hogwild"])
def test_workers_that_take_shards_from_a_queue_take_them_early(ranks, strategy):
    """On one rank every sample comes in its turn; on two, once in each epoch."""
    direct = ranks(1).call(loading_job, spec_of(strategy, num_data_workers=0))
    assert losses(ranks(1).call(loading_job, spec_of(strategy))[0]) == losses(direct[0])
    results = ranks(2).call(loading_job, spec_of(strategy))
    events = [event for result in results for event in result[0] if isinstance(event, StepEvent)]
    assert sum(event.num_samples for event in events) == 3 * 100
    assert [result[1:] for result in results] == [(2, 0, "")] * 2


AUGMENTING = CELL.replace("return self.inputs[i],", "return torch.randn(4),")


def augmented_job(state, folder, seed):
    """Return the inputs of this rank's first step, which are drawn at random."""
    multiprocessing.current_process()._config["daemon"] = False  # else it may have no children
    spec = spec_of("ddp", source=AUGMENTING, seed=seed)
    context = build_context(spec, state, {}, filename="here")
    with closing(context.strategy()) as strategy:
        strategy.setup(context.worker("t", num_steps=1))
        with context.source(strategy) as source:
            _, (inputs, _) = next(source)
    return inputs.tolist()


def test_processes_draw_other_random_numbers_on_each_rank_and_for_each_seed(ranks):
    drawn = [str(inputs) for seed in (0, 1) for inputs in ranks(2).call(augmented_job, seed)]
    assert len(set(drawn)) == len(drawn) == 4
    assert [str(inputs) for inputs in ranks(2).call(augmented_job, 1)] == drawn[2:]


def test_a_note_says_where_it_has_no_effect(ranks):
    in_memory = "def data(split): return torch.randn(100, 4), torch.zeros(100).long()"
    source = CELL.split("def data")[0] + in_memory
    events, most, *_ = ranks(2).call(loading_job, spec_of("ddp", source=source))[0]
    notes = next(event.notes for event in events if isinstance(event, RunHeader))
    assert most == 0
    assert any("the data are tensors in memory" in note for note in notes)


def test_a_failure_in_a_process_is_the_users_own_and_leaves_none(ranks):
    spec = spec_of("ddp", source=FAILING)
    for _, _, left, failed in ranks(1).call(loading_job, spec):
        assert left == 0
        assert failed.startswith("ZeroDivisionError")
        assert "self.inputs[i // (i != 77)]" in failed or "in __getitem__" in failed


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_leaves_no_process(ranks):
    spec = spec_of("ddp", num_epochs=1000)
    (result,) = ranks(1).call(loading_job, spec, interrupt)
    assert result[2:] == (0, "KeyboardInterrupt: ")


def die_job(state, folder, spec, pids):
    """Train, and be killed in the midst of it."""

    def die():
        pids.write_text(" ".join(str(child.pid) for child in psutil.Process().children()))
        os.kill(os.getpid(), signal.SIGKILL)

    return loading_job(state, folder, spec, die)


def test_a_killed_rank_leaves_no_process(fresh_ranks, tmp_path):
    (result,) = fresh_ranks(1).attempt(die_job, spec_of("ddp", num_epochs=1000), tmp_path / "pids")
    assert "died" in str(result)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_nothing_is_fetched_before_the_first_shard_is_asked_for():
    taken: list[int] = []

    def shards():
        for step in range(6):
            taken.append(step)
            yield Shard(step=step, part=0, num_parts=1)

    samples = DatasetSamples([float(number) for number in range(6)], None)
    processes = set(psutil.Process().children())
    with prefetching(
        samples, shards(), lambda shard: torch.tensor([shard.step]), 2, seed=0
    ) as fetched:
        assert len(set(psutil.Process().children()) - processes) == 2  # they have started
        assert taken == []
        found = [(shard.step, batch.tolist()) for shard, batch in fetched]
    assert found == [(step, [float(step)]) for step in range(6)]
