"""Processes that prefetch yield the same samples, and end with the run."""

import math
import multiprocessing
import os
import signal
import time
from contextlib import closing

import psutil
import pytest
import torch

from ddpnb.rank.tasks.batches import Shard
from ddpnb.rank.training.context import build_context
from ddpnb.rank.training.prefetching import prefetching
from tests.rank import runs
from tests.rank.runs import header_of, losses, steps_of
from tests.rank.sources import CELL, DATASET, RAGGED


def spec_of(strategy: str, **changes):
    values = {"source": DATASET, "num_epochs": 3, "batch_size": 20, "num_data_workers": 2}
    return runs.spec_of(strategy, **values | changes)


def children() -> int:
    return len(psutil.Process().children())


def loading_job(state, folder, spec, after=None):
    """Train; return the most processes that there were, the events, how many are left."""
    multiprocessing.current_process()._config["daemon"] = False  # else it may have no children
    events, most, before, failed = [], 0, children(), ""

    def publish(event):
        nonlocal most
        events.append(event)
        most = max(most, children() - before)
        if after is not None and len(events) == 5:
            after()

    try:
        runs.loop.run(
            spec,
            state=state,
            folder=folder,
            publish=publish,
            namespace={},
            should_stop=lambda: False,
        )
    except BaseException as error:  # noqa: BLE001  the test judges it
        failed = f"{type(error).__name__}: {error}"
    deadline = time.monotonic() + 20
    while children() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    return most, events, children() - before, failed


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [("dp", {}), ("ddp", {}), ("async", {}), ("ddp", {"source": RAGGED, "accumulate": 2})],
)
def test_samples_and_their_order_are_the_same(ranks, strategy, changes):
    num_ranks = 1 if strategy == "async" else 2
    direct = ranks(num_ranks).call(loading_job, spec_of(strategy, **changes, num_data_workers=0))
    ahead = ranks(num_ranks).call(loading_job, spec_of(strategy, **changes))
    assert [losses(result) for result in ahead] == [losses(result) for result in direct]
    assert losses(ahead[0])
    for most, _, left, failed in ahead[:1] if strategy == "dp" else ahead:
        assert (most, left, failed) == (2, 0, "")


def test_workers_that_take_shards_from_a_queue_take_each_sample_once(ranks):
    results = ranks(2).call(loading_job, spec_of("async"))
    assert sum(step.num_samples for each in results for step in steps_of(each)) == 3 * 100


def augmented_job(state, folder, seed):
    """Return the inputs of this rank's first step, which are drawn at random."""
    multiprocessing.current_process()._config["daemon"] = False  # else it may have no children
    source = DATASET.replace("return self.inputs[i],", "return torch.randn(4),")
    context = build_context(spec_of("ddp", source=source, seed=seed), state, {}, filename="here")
    with closing(context.strategy()) as strategy:
        strategy.setup(context.worker("t", num_steps=1))
        with context.source(strategy.shards()) as source:
            _, (inputs, _) = next(source)
    return inputs.tolist()


def test_processes_draw_other_random_numbers_on_each_rank_and_for_each_seed(ranks):
    drawn = [str(inputs) for seed in (0, 1) for inputs in ranks(2).call(augmented_job, seed)]
    assert len(set(drawn)) == len(drawn) == 4
    assert [str(inputs) for inputs in ranks(2).call(augmented_job, 1)] == drawn[2:]


def test_a_note_says_where_it_has_no_effect(ranks):
    result = ranks(1).call(loading_job, spec_of("ddp", source=CELL))[0]
    assert result[0] == 0
    assert any("--data-workers" in note for note in header_of(result).notes)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("broken", "after", "said"),
    [
        ("self.inputs[i // (i != 77)],", None, "ZeroDivision"),
        ("self.inputs[i],", interrupt, "Keyb"),
    ],
)
def test_neither_a_failure_nor_an_interrupt_leaves_a_process(ranks, broken, after, said):
    source = DATASET.replace("self.inputs[i],", broken)
    spec = spec_of("ddp", source=source, num_epochs=1000)
    ((_, _, left, failed),) = ranks(1).call(loading_job, spec, after)
    assert left == 0
    assert failed.startswith(said)


def die_job(state, folder, spec, pids):
    """Train, and be killed in the midst of it."""

    def die():
        pids.write_text(" ".join(str(child.pid) for child in psutil.Process().children()))
        os.kill(os.getpid(), signal.SIGKILL)

    return loading_job(state, folder, spec, die)


def test_a_killed_rank_leaves_no_process(fresh_ranks, tmp_path):
    fresh_ranks(1).attempt(die_job, spec_of("ddp", num_epochs=1000), tmp_path / "pids")
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

    def indices(shard):
        return torch.tensor([shard.step])

    before = children()
    with prefetching(torch.Tensor.sqrt, shards(), indices, 2, seed=0) as fetched:
        assert children() - before == 2  # they have started
        assert taken == []
        found = [(shard.step, batch.item()) for shard, batch in fetched]
    assert found == [(step, pytest.approx(math.sqrt(step))) for step in range(6)]
