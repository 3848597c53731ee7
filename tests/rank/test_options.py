"""Every option of a training does what it says."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.base import Plan
from ddpnb.rank.strategies.worker import Batch
from ddpnb.rank.tasks.batches import BatchSchedule
from ddpnb.rank.training.context import build_context
from ddpnb.rank.training.optimizers import Optimizers
from ddpnb.rank.training.requirements import check_strategy
from tests.rank.ranks import make_state
from tests.rank.runs import FEATURED, header_of, losses, spec_of, steps_of, train_job
from tests.rank.sources import CELL, HALVING, OWN_SGD

PLAN = Plan(num_ranks=4, num_workers=4, synchronous=True)
ORDER = BatchSchedule(80, batch_size=20, num_epochs=3, num_ranks=4, seed=0)  # 4 steps an epoch


def rates(num_updates: int, plan: Plan = PLAN, **choices) -> list[float]:
    """Make updates with the default optimizer; return the learning rate of each."""
    spec = spec_of("ddp", learning_rate=0.1, batch_per_worker=5, **choices)
    parameters = [nn.Parameter(torch.ones(1))]
    made = Optimizers(None, spec, plan, ORDER).make(parameters, nn.Module(), nn.Module)
    return rates_of(made, num_updates)


def rates_of(made: torch.optim.Optimizer, num_updates: int) -> list[float]:
    seen = []
    for _ in range(num_updates):
        made.step()
        seen.append(made.param_groups[0]["lr"])
    return seen


@pytest.mark.parametrize(("scaling", "full"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_learning_rate_grows_to_what_the_workers_allow(scaling, full):
    seen = rates(6, lr_scaling=scaling, num_lr_warmup_epochs=1)
    assert seen == pytest.approx([full * share for share in (0.25, 0.5, 0.75, 1, 1, 1)])


@pytest.mark.parametrize(
    ("word", "num_ranks", "num_updates"),
    [
        ("async", 2, 8),
        ("async:bound=0", 4, 4),
        ("hogwild", 4, 4),
        ("gossip", 4, 4),
    ],
)
def test_each_optimizer_warms_up_in_as_many_epochs(word, num_ranks, num_updates):
    """In an epoch of 4 steps each gradient alone would make 4 updates for each worker."""
    plan = make_strategy(word, {}).plan(make_state(0, num_ranks))
    seen = rates(10, plan, num_lr_warmup_epochs=1)
    assert seen == pytest.approx([0.1 * min(1, (t + 1) / num_updates) for t in range(10)])


@pytest.mark.parametrize(
    ("epochs", "is_noted"), [(0, False), (3, False), (0.25, True), (0.001, True), (4, True)]
)
def test_a_warm_up_without_effect_or_without_end_has_a_note(epochs, is_noted):
    spec = spec_of("ddp", num_lr_warmup_epochs=epochs, num_epochs=3)
    notes = Optimizers(None, spec, PLAN, ORDER).notes()
    assert [f"--lr-warmup {epochs:g}" in note for note in notes] == [True] * is_noted


def own_rates(lines: str) -> list[float]:
    """The learning rates of six updates of a cell's optimizer, two in an epoch."""
    spec = spec_of("single", source=CELL + lines, batch_size=100, num_epochs=3)
    context = build_context(spec, make_state(0, 1), {}, filename="here")
    worker = context.worker("t", num_steps=6)
    return rates_of(worker.optimizer(worker.parameters), 6)


BY_STEP = [0.8, 0.4, 0.2, 0.1, 0.05, 0.025]
BY_TWO = [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("made", [0.8] * 6),
        ("made, halving", BY_STEP),
        ("[made], [halving]", BY_STEP),
        ("{'optimizer': made}", [0.8] * 6),
        ("{'optimizer': made, 'lr_scheduler': halving}", BY_TWO),
        (
            "{'optimizer': made, 'lr_scheduler': {'scheduler': halving, 'interval': 'step', "
            "'frequency': 2}}",
            BY_TWO,
        ),
    ],
)
def test_all_that_lightning_takes_sets_the_rate(returned, expected):
    assert own_rates(HALVING.format(returned=returned)) == pytest.approx(expected)


def test_a_scheduler_steps_once_where_the_optimizers_step_calls_its_parents():
    torch.optim.SGD([torch.ones(1)])  # once its parent has been used, torch calls the hooks of both
    own = (
        "\nclass Own(torch.optim.SGD):\n"
        "    def step(self, closure=None): return super().step(closure)\n"
    )
    lines = HALVING.format(returned="made, halving").replace("torch.optim.SGD", "Own")
    assert own_rates(own + lines) == pytest.approx(BY_STEP)


@pytest.mark.parametrize("strategy", ["single", *FEATURED])
def test_a_batch_of_each_worker_grows_with_them_and_so_may_the_rate(ranks, strategy):
    """Goyal et al.: k workers of n samples each have a batch of k n, and k times the rate."""
    spec = spec_of(strategy, batch_per_worker=20, lr_scaling="linear", num_epochs=1)
    results = ranks(2).call(train_job, spec)
    num_workers = 1 if strategy == "single" else 2
    header, steps = header_of(results[0]), [step for each in results for step in steps_of(each)]
    assert {step.num_samples for step in steps} == {40 if strategy == "dp" else 20}
    assert sum(step.num_samples for step in steps) == header.num_samples == 200
    worker = build_context(spec, make_state(0, 2), {}, filename="here").worker("t", num_steps=1)
    rate = worker.optimizer(worker.parameters).param_groups[0]["lr"]
    assert rate == pytest.approx(0.05 * num_workers)


@pytest.mark.parametrize(
    ("strategy", "momentum", "used"),
    [("ddp", 0.0, 0.0), ("ddp", 0.9, 0.9), ("async", 0.9, 0.9), ("async:momentum=0", 0.9, 0.0)],
)
def test_momentum_is_what_was_chosen(ranks, strategy, momentum, used):
    spec = spec_of(strategy, momentum=momentum)
    result = ranks(1).call(train_job, spec)[0]
    assert header_of(result).momentum == used
    own = spec_of("single", source=CELL + OWN_SGD.format(momentum=used), num_warmup_steps=0)
    assert losses(result) == pytest.approx(losses(ranks(1).call(train_job, own)[0]), abs=1e-6)
    if momentum > 0:  # of a cell's own optimizer it is not known which of both is meant
        option = "async:momentum" if ":" in strategy else "--momentum"
        with pytest.raises(UserError, match=f"^{option} "):
            build_context(replace(spec, source=own.source), make_state(0, 2), {}, filename="here")


def test_a_shard_with_too_few_samples_to_accumulate_has_a_note(ranks):
    for accumulate, num_notes in ((16, 0), (20, 1)):
        result = ranks(2).call(train_job, spec_of("ddp", accumulate=accumulate))[0]
        assert len([each for each in header_of(result).notes if "accumulate" in each]) == num_notes


@pytest.mark.parametrize("strategy", sorted({*STRATEGIES} - {"hogwild", "ddp-shm"}))  # no GPU
def test_batchnorm_is_synchronised_only_where_each_step_is(strategy):
    spec = spec_of(strategy, sync_batchnorm=True)
    state = replace(make_state(0, 2), device="cuda:0", backend="nccl")
    context = build_context(spec, state, {}, filename="here")
    apart = {"single", "dp", "async", "local-sgd", "diloco", "gossip", "no-comm"}
    assert context.syncs_batchnorm == (strategy not in apart)


@pytest.mark.parametrize(("num", "most", "parts"), [(3, None, 3), (4, 3, 3)])
def test_all_slices_of_a_batch_are_split_into_equally_many(num, most, parts):
    rows = torch.ones(num, 1)
    batch = Batch(content=(rows, rows), num_samples=num, num_global=7, most_parts=most)
    assert len(batch.split(4)) == parts


@pytest.mark.parametrize(
    "word", ["hogwild", "ddp-shm", "single:threads=all", "ddp:powersgd_rank=4"]
)
def test_what_a_strategy_cannot_do_is_refused(word):
    device = torch.device("cpu" if word.startswith("ddp:") else "cuda")
    context = build_context(spec_of("ddp"), make_state(0, 2), {}, filename="here")
    worker = replace(context.worker("t", num_steps=1), device=device)
    with pytest.raises(UserError, match=word.partition(":")[0]):
        check_strategy(word, worker)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_choices_together_train(ranks, strategy):
    spec = spec_of(
        strategy,
        accumulate=2,
        amp="bf16",
        clip=1.0,
        momentum=0.5,
        batch_per_worker=16,
        lr_scaling="sqrt",
        num_lr_warmup_epochs=0.5,
        sync_batchnorm=True,
        source=CELL.replace("nn.ReLU()", "nn.BatchNorm1d(16), nn.ReLU()"),
    )
    result = ranks(2).call(train_job, spec)[0]
    assert result[0].held_out_loss < 0.6
    said = [note for note in header_of(result).notes if note.startswith("--sync-batchnorm")]
    assert len(said) == (0 if strategy == "single" else 1)  # no GPU here
