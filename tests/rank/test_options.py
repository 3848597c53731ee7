"""Every option of a training does what it says, for every strategy."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunHeader, RunSpec, StepEvent
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.base import Plan
from ddpnb.rank.strategies.device_replicas import AutocastModel
from ddpnb.rank.strategies.worker import Batch
from ddpnb.rank.tasks.batches import BatchSchedule, Shard
from ddpnb.rank.tasks.optimizers import default_optimizer
from ddpnb.rank.training import loop
from ddpnb.rank.training.context import build_context
from ddpnb.rank.training.optimizer_hooks import warm_up_notes, with_hooks
from tests.rank.ranks import make_state

CELL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))

def data(split):
    x = torch.randn(200 if split == "train" else 50, 4)
    return x, (x.sum(dim=1) > 0).long()
"""
SYNCHRONOUS = ["single", "dp", "ddp"]


def spec_of(strategy: str, **changes) -> RunSpec:
    values = {"run_id": "run-1", "source": CELL, "num_epochs": 2, "batch_size": 32}
    return RunSpec(strategy=strategy, **values | changes)


def train_job(state, folder, spec):
    events = []
    report = loop.run(
        spec,
        state=state,
        folder=folder,
        publish=events.append,
        namespace={},
        should_stop=lambda: False,
    )
    return report, events


def losses(result) -> list[float]:
    return [event.loss for event in result[1] if isinstance(event, StepEvent)]


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_accumulated_gradients_are_those_of_the_whole_shard(ranks, strategy):
    whole, in_parts = (
        ranks(2).call(train_job, spec_of(strategy, accumulate=num))[0] for num in (1, 4)
    )
    assert losses(in_parts) == pytest.approx(losses(whole), abs=1e-6)
    assert in_parts[0].held_out_loss == pytest.approx(whole[0].held_out_loss, abs=1e-6)


def test_asynchronous_gradients_accumulate_too(ranks):
    whole, in_parts = (
        ranks(1).call(train_job, spec_of("async", accumulate=num))[0] for num in (1, 3)
    )
    assert losses(in_parts) == pytest.approx(losses(whole), abs=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_learns_about_as_well_and_is_not_the_same(ranks, strategy):
    spec = spec_of(strategy, num_epochs=4, batch_size=20)
    exact, mixed = (
        ranks(1).call(train_job, spec_of(strategy, num_epochs=4, batch_size=20, amp=amp))[0]
        for amp in ("none", "bf16")
    )
    assert spec.amp == "none"
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


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_clipping_is_torchs_own(ranks, strategy):
    spec = spec_of(strategy, clip=0.1, num_warmup_steps=0)
    results = ranks(2).call(train_job, spec)
    assert results[0][0].final_loss == pytest.approx(clipped_by_hand(spec), abs=1e-6)
    unclipped = ranks(2).call(train_job, spec_of(strategy))
    assert unclipped[0][0].final_loss != pytest.approx(clipped_by_hand(spec), abs=1e-3)


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


def rates(num_updates: int, optimizer: torch.optim.Optimizer) -> list[float]:
    """Make updates; return the learning rate that each was made with."""
    seen = []
    for _ in range(num_updates):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
        optimizer.step()
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


def optimizer_of(plan: Plan = PLAN, **choices) -> torch.optim.Optimizer:
    spec = spec_of("ddp", batch_per_worker=5, **choices)
    parameters = [nn.Parameter(torch.ones(1))]
    return with_hooks(default_optimizer(0.1), spec, plan, ORDER)(parameters, nn.Module(), nn.Module)


@pytest.mark.parametrize(("scaling", "full"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_learning_rate_grows_to_what_the_workers_allow(scaling, full):
    seen = rates(6, optimizer_of(lr_scaling=scaling, num_lr_warmup_epochs=1))
    expected = [full * shard for shard in (0.25, 0.5, 0.75, 1, 1, 1)]
    assert seen == pytest.approx(expected)


SHARED = ("single", "dp", "ddp", "async", "no-comm")


@pytest.mark.parametrize("strategy", SHARED)
def test_a_batch_of_each_worker_grows_with_them_and_so_may_the_rate(ranks, strategy):
    """Goyal et al.: k workers of n samples each have a batch of k n, and k times the rate."""
    spec = spec_of(strategy, batch_per_worker=20, lr_scaling="linear", num_epochs=1)
    results = ranks(2).call(train_job, spec)
    num_workers = 1 if strategy == "single" else 2
    (header,) = [event for event in results[0][1] if isinstance(event, RunHeader)]
    steps = [event for _, events in results for event in events if isinstance(event, StepEvent)]
    shares = {20} if strategy != "dp" else {40}  # one process reports both
    assert {step.num_samples for step in steps} == shares
    assert sum(step.num_samples for step in steps) == header.num_samples == 200
    context = build_context(spec, make_state(0, 2), {}, filename="here")
    optimizer = context.worker("here", num_steps=1).optimizer
    rate = optimizer([nn.Parameter(torch.ones(1)) for _ in range(4)]).param_groups[0]["lr"]
    assert rate == pytest.approx(0.05 * num_workers)
    said = [note for note in header.notes if note.startswith("Weak scaling")]
    assert said == [
        "Weak scaling: 20 samples per step of each worker, so a global batch of 40; single has 20."
    ] * (num_workers > 1)


def test_weak_scaling_is_plain_sgd_with_the_larger_batch_and_rate(ranks):
    weak = spec_of("ddp", batch_per_worker=16, lr_scaling="linear")
    plain = spec_of("single", batch_size=32, learning_rate=0.1)
    ends = [ranks(2).call(train_job, spec)[0][0].final_loss for spec in (weak, plain)]
    assert ends[0] == pytest.approx(ends[1], abs=1e-6)


def test_a_batch_of_all_workers_that_is_too_large_is_refused_in_its_own_words():
    spec = spec_of("ddp", batch_per_worker=101)
    assert build_context(replace(spec, strategy="single"), make_state(0, 2), {}, filename="here")
    with pytest.raises(UserError) as caught:
        build_context(spec, make_state(0, 2), {}, filename="here")
    assert str(caught.value) == (
        "--batch-per-worker 101 makes a global batch of 202 with 2 workers, larger than the "
        "training split (200 samples); give 100 or less."
    )


@pytest.mark.parametrize(
    ("strategy", "momentum", "used"),
    [("ddp", 0.0, 0.0), ("ddp", 0.9, 0.9), ("async", 0.9, 0.9), ("async:momentum=0", 0.9, 0.0)],
)
def test_momentum_is_what_was_chosen(ranks, strategy, momentum, used):
    _, events = ranks(1).call(train_job, spec_of(strategy, momentum=momentum))[0]
    header = next(event for event in events if isinstance(event, RunHeader))
    assert header.momentum == used
    spec = spec_of("single", source=CELL + OWN.format(momentum=used), num_warmup_steps=0)
    reference = ranks(1).call(train_job, spec)[0]
    assert losses((None, events)) == pytest.approx(losses(reference), abs=1e-6)


OWN = """
def optimizer(params):
    return torch.optim.SGD(params, lr=0.05, momentum={momentum})
"""


@pytest.mark.parametrize(
    ("strategy", "momentum", "option"),
    [("ddp", 0.9, "--momentum"), ("async:momentum=0", 0.0, "async:momentum")],
)
def test_a_momentum_beside_a_cells_own_optimizer_is_refused(strategy, momentum, option):
    spec = spec_of(strategy, source=CELL + OWN.format(momentum=0.5), momentum=momentum)
    with pytest.raises(UserError) as caught:
        build_context(spec, make_state(0, 2), {}, filename="here")
    assert str(caught.value) == (
        f"{option} is for the default optimizer, and the cell defines optimizer(params): "
        "leave one of them out."
    )


def test_asynchronous_workers_make_more_updates_in_an_epoch():
    plan = make_strategy("async", {}).plan(make_state(0, 2))
    seen = rates(10, optimizer_of(plan, num_lr_warmup_epochs=1))
    assert seen == pytest.approx([0.1 * min(1, (t + 1) / 8) for t in range(10)])


@pytest.mark.parametrize(
    ("word", "num_updates"),
    [("async:bound=0", 4), ("async:period=2", 8), ("hogwild", 4), ("gossip", 4)],
)
def test_an_optimizer_with_fewer_updates_warms_up_in_as_many_epochs(word, num_updates):
    """Of 4 workers in an epoch of 4 steps: each gradient alone would make 16 updates."""
    plan = make_strategy(word, {}).plan(make_state(0, 4))
    seen = rates(10, optimizer_of(plan, num_lr_warmup_epochs=1))
    assert seen == pytest.approx([0.1 * min(1, (t + 1) / num_updates) for t in range(10)])


@pytest.mark.parametrize(
    ("epochs", "note"),
    [
        (0, ""),
        (3, ""),
        (0.25, "--lr-warmup 0.25 has no effect: that is the time of one update, or less."),
        (0.001, "--lr-warmup 0.001 has no effect: that is the time of one update, or less."),
        (4, "The full learning rate is never reached: --lr-warmup 4 is longer than the run."),
    ],
)
def test_a_warm_up_without_effect_or_without_end_has_a_note(epochs: float, note: str):
    spec = spec_of("ddp", num_lr_warmup_epochs=epochs, num_epochs=3)
    assert list(warm_up_notes(spec, PLAN, ORDER)) == ([note] if note else [])


def test_a_shard_with_too_few_samples_to_accumulate_has_a_note(ranks):
    for accumulate, expected in (
        (16, []),
        (20, ["--accumulate 20 makes only 16 parts: a worker has 16 samples of each batch."]),
    ):
        _, events = ranks(2).call(train_job, spec_of("ddp", accumulate=accumulate))[0]
        (header,) = [event for event in events if isinstance(event, RunHeader)]
        assert [note for note in header.notes if "accumulate" in note] == expected


@pytest.mark.parametrize("strategy", sorted({*STRATEGIES} - {"hogwild", "ddp-shm"}))  # no GPU
def test_batchnorm_is_synchronised_only_where_each_step_is(strategy):
    spec = spec_of(strategy, sync_batchnorm=True)
    state = replace(make_state(0, 2), device="cuda:0", backend="nccl")
    context = build_context(spec, state, {}, filename="here")
    apart = {"single", "dp", "async", "local-sgd", "diloco", "gossip", "no-comm"}
    assert context.syncs_batchnorm == (strategy not in apart)


def test_shards_that_synchronise_in_each_part_have_equally_many():
    def num_parts(num_samples: int, most_parts: int | None) -> int:
        rows = torch.ones(num_samples, 1)
        batch = Batch(
            content=(rows, rows),
            num_samples=num_samples,
            num_global=7,
            most_parts=most_parts,
        )
        return len(batch.split(4))

    assert [num_parts(4, None), num_parts(3, None)] == [4, 3]
    assert [num_parts(4, 3), num_parts(3, 3)] == [3, 3]


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
    report, events = ranks(2).call(train_job, spec)[0]
    assert report.held_out_loss < 0.6
    (header,) = [event for event in events if isinstance(event, RunHeader)]
    said = [note for note in header.notes if note.startswith("--sync-batchnorm has no effect")]
    assert len(said) == (0 if strategy == "single" else 1)  # no GPU here
