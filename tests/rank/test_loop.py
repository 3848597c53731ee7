"""A run reports all it should, stops when asked, and leaves no trace."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.messages import RunSpec
from tests.rank import runs
from tests.rank.runs import (
    ASYNCHRONOUS,
    FEATURED,
    header_of,
    losses,
    marks_of,
    run_job,
    steps_of,
    unzip,
)
from tests.rank.sources import CELL, WITH_DROPOUT

__all__ = ["run_job", "spec_of", "unzip"]


def spec_of(strategy: str, **changes) -> RunSpec:
    return runs.spec_of(strategy, **{"source": WITH_DROPOUT, "num_epochs": 3} | changes)


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [("ddp", 1), *((name, 2) for name in STRATEGIES), *((name, 3) for name in FEATURED)],
)
def test_header_events_and_reports_agree(ranks, strategy, num_ranks):
    results = ranks(num_ranks).call(run_job, spec_of(strategy))
    header, steps = header_of(results[0]), [steps_of(result) for result in results]
    assert [len(events) for _, events in results[1:]] == [len(mine) for mine in steps[1:]]
    assert sum(step.num_samples for mine in steps for step in mine) == header.num_samples
    assert header.num_samples == 3 * (200 - 200 % num_ranks)  # as DistributedSampler(drop_last)
    assert header.num_parameters == 16 * 5 + 2 * 17
    assert header.num_workers == (1 if strategy == "single" else num_ranks)
    assert header.synchronous == (strategy not in ASYNCHRONOUS)
    assert header.is_emulated == (strategy == "dp")
    for (report, _), mine in zip(results, steps, strict=True):
        if strategy in ASYNCHRONOUS:  # a worker that wakes up late may find no shard left
            assert report.took_part or not mine
        else:
            assert report.took_part == bool(mine)
        assert [step.step for step in mine] == list(range(report.num_steps))
        assert report.num_samples == sum(step.num_samples for step in mine)
        assert [step.seconds for step in mine] == sorted(step.seconds for step in mine)
        assert all((step.staleness is None) == (strategy not in ASYNCHRONOUS) for step in mine)
        if mine:
            assert report.seconds >= mine[-1].seconds  # with what follows the last step
    (first, _), *others = results
    assert max(first.final_loss, first.held_out_loss) < 0.6
    assert first.held_out_accuracy > 0.7
    assert all(math.isnan(report.final_loss) for report, _ in others)  # rank 0 alone judges


def shared_job(state, folder, spec):
    return run_job(replace(state, shares_device=True), folder, spec)


def test_a_gpu_that_ranks_share_counts_once(ranks):
    """Here without a GPU: what a rank reports follows from the state of its device."""
    assert header_of(ranks(2).call(shared_job, spec_of("ddp"))[0]).num_devices == 1


COUNTING = CELL + (
    "def training_step(model, batch):\n"
    "    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])\n"
    "    return {'loss': loss, 'threads': torch.get_num_threads()}\n"
)


@pytest.mark.parametrize(("strategy", "expected"), [("single", 1), ("single:threads=all", 2)])
def test_one_process_may_have_the_threads_of_all(ranks, strategy, expected):
    result, _ = ranks(2).call(run_job, spec_of(strategy, source=COUNTING))  # puts them back
    header = header_of(result)
    assert {step.metrics["threads"] for step in steps_of(result)} == {expected}
    assert (header.num_threads, header.num_devices, header.num_workers) == (expected, expected, 1)


@pytest.mark.parametrize(
    ("strategy", "stop_ranks"), [("ddp", [0]), ("ddp", [1]), ("local-sgd", [1]), ("async", [0, 1])]
)
def test_a_stop_of_one_rank_ends_the_run_on_all(ranks, strategy, stop_ranks):
    run_id = f"stopped-{strategy}-{stop_ranks}"  # the group's store keeps where a run stopped
    spec = spec_of(strategy, num_epochs=300, run_id=run_id)
    reports, events = unzip(ranks(2).call(run_job, spec, 20, stop_ranks))
    assert sum(report.num_samples for report in reports) < header_of((None, events[0])).num_samples
    assert all(report.was_stopped for report in reports)
    assert reports[stop_ranks[0]].num_steps >= 20
    if strategy not in ASYNCHRONOUS:
        most = {"local-sgd": 50}.get(strategy, 30)  # with 8 steps from one average to the next
        assert reports[0].num_steps == reports[1].num_steps <= most
    assert reports[0].held_out_accuracy > 0.6


def test_a_report_says_what_each_rank_holds(ranks):
    size = 4 * (16 * 5 + 2 * 17)
    for word, parameters, state in (("ddp", size, size), ("fsdp", size // 2, size // 2)):
        for report, _ in ranks(2).call(run_job, spec_of(word, num_epochs=1, momentum=0.9)):
            assert (report.num_parameter_bytes, report.num_optimizer_bytes) == (parameters, state)


SPARSE = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Embedding(20, 8, sparse={sparse}), nn.Flatten(), nn.Linear(16, 2))

def data(split):
    torch.manual_seed(3)
    words = torch.randint(20, (100, 2))
    return words, (words.sum(dim=1) > 19).long()
"""


@pytest.mark.parametrize("strategy", ["dp", "no-comm"])
def test_sparse_gradients_train_as_dense_ones_do(ranks, strategy):
    sparse, dense = (
        ranks(2).call(
            run_job, spec_of(strategy, source=SPARSE.format(sparse=sparse), momentum=0.9)
        )[0][0]
        for sparse in (True, False)
    )
    assert sparse.held_out_accuracy > 0.7
    assert sparse.final_loss == pytest.approx(dense.final_loss, abs=1e-4)


def test_a_run_whose_evaluation_fails_is_kept_and_says_so(ranks):
    source = CELL + (
        "def data(split):\n"
        "    x = torch.randn(200, 4)\n"
        "    targets = (x.sum(dim=1) > 0).long()\n"
        "    if split == 'test': targets[199] = 2\n"  # not among the samples that are tried
        "    return x, targets\n"
    )
    spec = spec_of("ddp", source=source)
    result = ranks(2).call(run_job, spec)[0]
    assert result[0].num_steps == len(losses(result)) > 0
    assert result[0].final_loss < 0.6
    assert math.isnan(result[0].held_out_loss)
    ((rank, text),) = marks_of(result)
    assert rank == 0
    assert "IndexError: Target 2 is out of bounds." in text


def drawn_job(state, folder, spec, seed):
    """Run it after so many of the user's random numbers; return its losses."""
    with torch.random.fork_rng():
        torch.manual_seed(seed + state.rank)
        return losses(runs.train_job(state, folder, spec))


def test_a_run_repeats_whatever_random_numbers_came_before(ranks):
    one, other = (ranks(2).call(drawn_job, spec_of("ddp"), seed) for seed in (3, 30))
    assert one == other
    assert one != ranks(2).call(drawn_job, spec_of("ddp", seed=1), 3)


def test_a_rank_does_not_import_at_start_what_few_runs_need():
    code = "import sys, ddpnb.rank.training.loop; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=True, capture_output=True)
    few = {"sklearn", "torch.distributed.tensor", "torch.distributed.optim"}
    assert not few & set(done.stdout.decode().split())
