"""A run reports all it should, stops when asked, and leaves no trace."""

import math
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.messages import Mark, RunHeader, RunReport, RunSpec, StepEvent
from ddpnb.rank.training import loop
from tests.rank.ranks import make_state

CELL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))

def data(split):
    x = torch.randn(200 if split == "train" else 50, 4)
    return x, (x.sum(dim=1) > 0).long()
"""


ASYNCHRONOUS = ("async", "hogwild")


def spec_of(strategy: str, **changes) -> RunSpec:
    values = {"run_id": "run-1", "source": CELL, "num_epochs": 3, "batch_size": 32}
    return RunSpec(strategy=strategy, **values | changes)


def run_job(state, folder, spec, stop_at=math.inf, stop_rank=0):
    """Run it with a namespace and random numbers of the user's; return what came of it."""
    events: list[RunHeader | StepEvent] = []
    namespace = {"kept": torch.ones(3), "torch": None}
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    report = loop.run(
        spec,
        state=state,
        folder=folder,
        publish=events.append,
        namespace=namespace,
        should_stop=lambda: state.rank == stop_rank and len(events) > stop_at,
    )
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert list(namespace) == ["kept", "torch"]
    assert namespace["kept"].tolist() == [1, 1, 1]
    assert torch.get_num_threads() == 1
    torch.distributed.barrier()
    assert list(folder.iterdir()) == []
    return report, events


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_header_events_and_reports_agree(ranks, strategy, num_ranks):
    reports, events = unzip(ranks(num_ranks).call(run_job, spec_of(strategy)))
    header = events[0][0]
    assert isinstance(header, RunHeader)
    assert not any(isinstance(e, RunHeader) for rank in events for e in rank if e is not header)
    steps = [[e for e in rank if isinstance(e, StepEvent)] for rank in events]
    assert sum(e.num_samples for rank in steps for e in rank) == header.num_samples
    assert header.num_samples == 3 * (200 - 200 % num_ranks)  # as DistributedSampler(drop_last)
    assert header.num_parameters == 16 * 5 + 2 * 17
    assert header.num_workers == (1 if strategy == "single" else num_ranks)
    assert header.synchronous == (strategy not in ASYNCHRONOUS)
    for report, mine in zip(reports, steps, strict=True):
        if strategy in ASYNCHRONOUS:  # a worker that wakes up late may find no shard left
            assert report.took_part or not mine
        else:
            assert report.took_part == bool(mine)
        assert [e.step for e in mine] == list(range(report.num_steps))
        assert report.num_samples == sum(e.num_samples for e in mine)
        assert [e.seconds for e in mine] == sorted(e.seconds for e in mine)
        assert all((e.staleness is None) == (strategy not in ASYNCHRONOUS) for e in mine)
        if mine:
            assert report.seconds >= mine[-1].seconds  # with what follows the last step
    assert_judged(*reports)


def assert_judged(first: RunReport, *others: RunReport, has_learnt: bool = True) -> None:
    """Rank 0 alone judges the model."""
    most = 0.6 if has_learnt else 2.0
    assert first.final_loss < most
    assert first.held_out_loss < most
    assert first.held_out_accuracy > (0.7 if has_learnt else 0.0)
    assert all(math.isnan(report.final_loss) for report in others)


def test_notes_say_what_is_emulated_or_adjusted(ranks):
    headers = {
        name: ranks(2).call(run_job, spec_of(name))[0][1][0]
        for name in ("single", "dp", "ddp", "async")
    }
    assert [name for name, header in headers.items() if header.is_emulated] == ["dp"]
    notes = {name: header.notes for name, header in headers.items()}
    assert notes["ddp"] == ()
    assert notes["single"] == ("1 thread, as each rank has; single:threads=all takes all 2.",)
    assert notes["dp"] == ("DataParallel is emulated on CPU threads.",)
    assert "weighted by their share" in notes["async"][0]
    own = spec_of("single", source=CELL + "optimizer = torch.optim.Adam")
    assert "--lr is not used" in ranks(2).call(run_job, own)[0][1][0].notes[-1]


def test_a_gpu_that_ranks_share_counts_once(ranks):
    """Here without a GPU: what a rank reports follows from the state of its device."""
    assert ranks(2).call(shared_job, spec_of("ddp"))[0] == 1
    assert ranks(2).call(run_job, spec_of("ddp"))[0][1][0].num_devices == 2


def shared_job(state, folder, spec):
    _, events = run_job(replace(state, shares_device=True), folder, spec)
    return events[0].num_devices if state.rank == 0 else None


def threads_job(state, folder, spec):
    """Return the header, and how many threads the model was called with."""
    namespace = {"called_with": []}
    headers = []
    loop.run(
        spec,
        state=state,
        folder=folder,
        publish=headers.append,
        namespace=namespace,
        should_stop=lambda: False,
    )
    return headers[:1], set(namespace["called_with"]), torch.get_num_threads()


@pytest.mark.parametrize(("strategy", "expected"), [("single", 1), ("single:threads=all", 2)])
def test_one_process_may_have_the_threads_of_all(ranks, strategy, expected):
    source = CELL + (
        "class Model(nn.Linear):\n"
        "    def forward(self, inputs):\n"
        "        called_with.append(torch.get_num_threads())\n"
        "        return super().forward(inputs)\n"
        "def model(): return Model(4, 2)\n"
    )
    first, _ = ranks(2).call(threads_job, spec_of(strategy, source=source))
    (header,), called_with, after = first
    assert called_with == {expected}
    assert (header.num_threads, header.num_devices, header.num_workers) == (expected, expected, 1)
    assert after == 1


def test_every_strategy_starts_from_the_same_weights_and_batch(ranks):
    source = CELL.replace("nn.Dropout(0.1), ", "")
    single, dp, ddp = (
        unzip(ranks(2).call(run_job, spec_of(name, source=source)))[1]
        for name in ("single", "dp", "ddp")
    )
    assert dp[0][1].loss == pytest.approx(single[0][1].loss, abs=1e-6)
    first_steps = [next(e for e in rank if isinstance(e, StepEvent)) for rank in ddp]
    mean = sum(e.loss * e.num_samples for e in first_steps) / 32
    assert mean == pytest.approx(single[0][1].loss, abs=1e-6)


@pytest.mark.parametrize("stop_rank", [0, 1])
@pytest.mark.parametrize("strategy", ["ddp", "ddp-shm", "async", "hogwild", "local-sgd", "gossip"])
def test_a_stop_of_one_rank_ends_the_run_on_all(ranks, strategy, stop_rank):
    spec = spec_of(strategy, num_epochs=300)
    reports, events = unzip(ranks(2).call(run_job, spec, 20, stop_rank))
    planned = next(e.num_samples for e in events[0] if isinstance(e, RunHeader))
    assert sum(report.num_samples for report in reports) < planned
    assert reports[stop_rank].num_steps >= 20
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


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if not STRATEGIES[name].is_dense])
def test_sparse_gradients_train_as_dense_ones_do(ranks, strategy):
    sparse, dense = (
        ranks(2).call(
            run_job, spec_of(strategy, source=SPARSE.format(sparse=sparse), momentum=0.9)
        )[0][0]
        for sparse in (True, False)
    )
    assert math.isfinite(sparse.final_loss)
    if strategy not in ASYNCHRONOUS:
        assert sparse.held_out_accuracy > 0.7
        assert sparse.final_loss == pytest.approx(dense.final_loss, abs=1e-4)


def test_regression_has_no_accuracy(ranks):
    source = CELL + (
        "def data(split): return torch.randn(40, 4), torch.randn(40, 2)\nloss = nn.MSELoss()\n"
    )
    report, _ = ranks(1).call(run_job, spec_of("ddp", source=source))[0]
    assert math.isnan(report.held_out_accuracy)
    assert report.held_out_loss > 0


ONE_COLUMN = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten({first}))

def data(split):
    x = torch.randn(200, 4)
    return x, (x.sum(dim=1) > 0).long()

def loss(outputs, targets):
    return nn.functional.binary_cross_entropy_with_logits(outputs.flatten(), targets.float())
"""


@pytest.mark.parametrize("first", [0, 1], ids=["(N,)", "(N, 1)"])
def test_a_model_of_one_column_is_judged_by_its_loss_alone(ranks, first):
    spec = spec_of("ddp", source=ONE_COLUMN.format(first=first), momentum=0.9)
    report, _ = ranks(1).call(run_job, spec)[0]
    assert report.held_out_loss < 0.5
    assert math.isnan(report.held_out_accuracy)


def test_a_run_whose_evaluation_fails_is_kept_and_says_so(ranks):
    source = CELL + (
        "def data(split):\n"
        "    x = torch.randn(200, 4)\n"
        "    targets = (x.sum(dim=1) > 0).long()\n"
        "    if split == 'test': targets[199] = 2\n"  # not among the samples that are tried
        "    return x, targets\n"
    )
    spec = spec_of("ddp", source=source)
    loop.validate(spec, state=make_state(0, 2), namespace={})
    report, events = ranks(2).call(run_job, spec)[0]
    assert report.num_steps == sum(isinstance(event, StepEvent) for event in events) > 0
    assert report.final_loss < 0.6
    assert math.isnan(report.held_out_loss)
    (mark,) = [event for event in events if isinstance(event, Mark)]
    assert mark.text == (
        "could not evaluate the model on held-out samples (IndexError: Target 2 is out of bounds.)"
    )


def drawn_job(state, folder, spec, seed):
    """Run it after so many of the user's random numbers; return its losses."""
    events: list[RunHeader | StepEvent] = []
    with torch.random.fork_rng():
        torch.manual_seed(seed + state.rank)
        loop.run(
            spec,
            state=state,
            folder=folder,
            publish=events.append,
            namespace={},
            should_stop=lambda: False,
        )
    return curve((None, events))


def test_a_run_repeats_whatever_random_numbers_came_before(ranks):
    one, other = (ranks(2).call(drawn_job, spec_of("ddp"), seed) for seed in (3, 30))
    assert one == other
    assert one != ranks(2).call(drawn_job, spec_of("ddp", seed=1), 3)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
@pytest.mark.parametrize(
    ("batch_size", "momentum", "least"), [(64, 0.9, 0.95), (256, 0.9, 0.95), (64, 0.0, 0.93)]
)
def test_digits_are_learnt(ranks, strategy, batch_size, momentum, least):
    spec = RunSpec(
        run_id="d",
        strategy=strategy,
        task="digits",
        num_epochs=8,
        batch_size=batch_size,
        momentum=momentum,
    )
    report, _ = ranks(2).call(run_job, spec)[0]
    assert report.held_out_accuracy > 0.7


def test_synthetic_data_are_learnt_and_said_to_be_synthetic(ranks):
    spec = RunSpec(run_id="s", strategy="ddp", task="synthetic", num_epochs=2)
    report, events = ranks(2).call(run_job, spec)[0]
    assert report.held_out_accuracy > 0.9
    assert "ynthetic" in events[0].notes[0]


@pytest.mark.parametrize(
    "module", ["sklearn", "torch.distributed.tensor", "torch.distributed.optim"]
)
def test_a_rank_does_not_import_at_start_what_few_runs_need(module):
    code = f"import sys, ddpnb.rank.training.loop; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def unzip(results):
    reports, events = zip(*results, strict=True)
    return reports, events


def curve(result) -> list[float]:
    return [event.loss for event in result[1] if isinstance(event, StepEvent)]
