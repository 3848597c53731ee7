"""Every option of a training does what it says."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.base import Plan
from ddpnb.rank.strategies.device_replicas import AutocastModel
from ddpnb.rank.strategies.worker import Batch
from ddpnb.rank.tasks.batches import BatchSchedule, Shard
from ddpnb.rank.training.context import build_context
from ddpnb.rank.training.optimizers import Optimizers
from tests.rank.ranks import make_state
from tests.rank.runs import FEATURED, header_of, losses, spec_of, steps_of, train_job
from tests.rank.sources import CELL, HALVING, OWN_SGD


@pytest.mark.parametrize("strategy", FEATURED)
def test_accumulated_gradients_are_those_of_the_whole_shard(ranks, strategy):
    num_ranks = 1 if strategy == "async" else 2
    whole, in_parts = (
        ranks(num_ranks).call(train_job, spec_of(strategy, accumulate=num))[0] for num in (1, 4)
    )
    assert losses(in_parts) == pytest.approx(losses(whole), abs=1e-6)
    assert in_parts[0].held_out_loss == pytest.approx(whole[0].held_out_loss, abs=1e-6)


@pytest.mark.parametrize("strategy", FEATURED)
def test_bfloat16_learns_about_as_well_and_is_not_the_same(ranks, strategy):
    exact, mixed = (
        ranks(1).call(train_job, spec_of(strategy, num_epochs=4, batch_size=20, amp=amp))[0]
        for amp in ("none", "bf16")
    )
    assert losses(mixed)[-1] < 0.8 * losses(mixed)[0]
    assert losses(mixed) != losses(exact)
    assert mixed[0].held_out_loss == pytest.approx(exact[0].held_out_loss, abs=0.05)


class TypeOf(nn.Module):
    """A linear layer that notes what it computes in."""

    def __init__(self, types: list[torch.dtype]) -> None:
        super().__init__()
        self.linear, self.types = nn.Linear(4, 2), types

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.linear(inputs)
        self.types.append(outputs.dtype)
        return outputs


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
def test_replicas_of_a_model_compute_in_the_type_that_was_asked_for(amp):
    """Also on torch's threads, which open a context without a type."""
    types: list[torch.dtype] = []
    cast = AutocastModel(TypeOf(types), lambda: torch.autocast("cpu", amp))

    def in_a_thread():
        with torch.autocast("cpu"):
            cast(lambda model, part: model(part), torch.ones(4, 4))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert types == [amp]


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp"])
def test_clipping_is_torchs_own(ranks, strategy):
    spec = spec_of(strategy, clip=0.1, num_warmup_steps=0)
    clipped, usual = (
        ranks(2).call(train_job, each)[0][0].final_loss for each in (spec, replace(spec, clip=None))
    )
    assert clipped == pytest.approx(clipped_by_hand(spec), abs=1e-6)
    assert clipped != pytest.approx(usual, abs=1e-3)


def clipped_by_hand(spec: RunSpec) -> float:
    """Train in plain torch; return the loss over the training split."""
    defined: dict = {}
    exec(spec.source, defined)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inputs, targets = defined["data"]("train")
        torch.manual_seed(0)
        model = defined["model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    order = BatchSchedule(200, batch_size=32, num_epochs=2, num_ranks=2, seed=0)
    for step in range(order.num_steps):
        chosen = order.indices(Shard(step=step, part=0, num_parts=1))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(inputs), targets).item()


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
    context = build_context(spec, make_state(0, 2), {}, filename="here")
    optimizer = context.worker("here", num_steps=1).optimizer
    rate = optimizer([nn.Parameter(torch.ones(1)) for _ in range(4)]).param_groups[0]["lr"]
    assert rate == pytest.approx(0.05 * num_workers)


def test_weak_scaling_is_plain_sgd_with_the_larger_batch_and_rate(ranks):
    weak = spec_of("ddp", batch_per_worker=16, lr_scaling="linear")
    plain = spec_of("single", batch_size=32, learning_rate=0.1)
    ends = [ranks(2).call(train_job, spec)[0][0].final_loss for spec in (weak, plain)]
    assert ends[0] == pytest.approx(ends[1], abs=1e-6)


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


@pytest.mark.parametrize(("num", "most", "parts"), [(4, None, 4), (3, None, 3), (4, 3, 3)])
def test_shards_that_synchronise_in_each_part_have_equally_many(num, most, parts):
    rows = torch.ones(num, 1)
    batch = Batch(content=(rows, rows), num_samples=num, num_global=7, most_parts=most)
    assert len(batch.split(4)) == parts


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
