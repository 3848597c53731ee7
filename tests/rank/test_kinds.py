"""Batches, models and optimizers of any kind train as in plain torch, or are rejected first."""

import math

import pytest
import torch
from torch import nn

from ddpnb.protocol.errors import UserError
from ddpnb.rank.random_state import note_start
from ddpnb.rank.tasks.cell import cell_task
from ddpnb.rank.training import loop, validation
from ddpnb.rank.training.run import Surroundings
from tests.cells import CELL, NET, ROWS
from tests.rank import runs
from tests.rank.ranks import RankFailedError

BATCH = 20
DROPS = f"""{NET}
def data(split):
    x = torch.randn(60, 4)
    return [(row, int(row.sum() > 0)) for row in x]

def collate_fn(items):
    kept = [(x, y) for x, y in items if x[0] > 0.3] or items[:1]
    return torch.stack([x for x, _ in kept]), torch.tensor([y for _, y in kept])
"""
WINDOWS = DROPS.replace("if x[0] > 0.3] or items[:1]", "for _ in range(1 + int(x[0] > 0))]")
IN_OBJECTS = """
from dataclasses import dataclass
from types import SimpleNamespace
class Slotted:
    __slots__ = ("x", "y")
    def __init__(self, x, y): self.x, self.y = x, y
@dataclass(frozen=True)
class Data:
    x: object
    y: object
made = {"dataclass": Data, "slots": Slotted, "namespace": lambda x, y: SimpleNamespace(x=x, y=y)}
def data(split):
    x = torch.randn(60, 4)
    return [(row, int(row.sum() > 0)) for row in x]
def collate_fn(items):
    return made[KIND](torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items]))
def training_step(model, batch):
    assert len(batch.x) == len(batch.y) <= (MOST if model.training else 20)
    return nn.functional.cross_entropy(model(batch.x), batch.y)
"""
BUFFERS = """
class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x):
        GROW
        return self.layer(x)
def model(): return Buffered()
"""
GROW = {
    "registered": 'hasattr(self, "b") or self.register_buffer("b", torch.ones(4))',
    "not saved": 'hasattr(self, "b") or self.register_buffer("b", torch.ones(4), persistent=False)',
    "growing": 'self.register_buffer("b", torch.ones(len(getattr(self, "b", ())) + 1))',
}
SCRIPTS = {
    "scripted": "torch.jit.script(plain())",
    "traced": "torch.jit.trace(plain(), torch.zeros(3, 4))",
    "within a model": "nn.Sequential(torch.jit.script(nn.Linear(4, 16)), *plain()[1:])",
}
OPTIMIZERS = {
    "reads its parameters": """
class Own(torch.optim.Optimizer):
    def __init__(self, rate, params):
        params = list(params)
        groups = [[p for p in params if p.ndim == n] for n in (1, 2)]
        super().__init__([{"params": each, "rate": rate} for each in groups], {})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["rate"] * p.grad / p.grad.norm())
def optimizer(params): return Own(0.1, params)
""",
    "wraps two": """
class Both(torch.optim.Optimizer):
    def __init__(self, params):
        flat, rest = ([p for p in params if (p.ndim < 2) == f] for f in (True, False))
        self.made = torch.optim.Adam(flat, 0.01), torch.optim.SGD(rest, 0.1, 0.9)
        super().__init__([{"params": params}], {})
        self.param_groups = [group for each in self.made for group in each.param_groups]
    def step(self):
        for each in self.made: each.step()
def optimizer(params): return Both(params)
""",
    "fills its state at once": "def optimizer(params): return torch.optim.Adagrad(params, 0.1)",
    "has a hook over all": """
def optimizer(params):
    made = torch.optim.SGD(params, 0.5)
    made.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(params, 0.01) and None)
    return made
""",
}
AVERAGING = """
class Averaging(torch.optim.SGD):
    is_training, means = False, {}
    @torch.no_grad()
    def step(self):
        assert self.is_training
        super().step()
        for p in self.param_groups[0]["params"]: self.means.setdefault(p, p.clone()).lerp_(p, 0.2)
    @torch.no_grad()
    def swap(self):
        self.is_training = not self.is_training
        for p, mean in self.means.items():
            held = p.clone()
            p.copy_(mean), mean.copy_(held)
    def train(self): self.is_training or self.swap()
    def eval(self): self.is_training and self.swap()
def optimizer(params): return Averaging(params, 0.1)
"""
"""An optimizer with ``train`` and ``eval``, like those of the package schedulefree."""
UNFROZEN = """
class Unfrozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.num = nn.Linear(4, 4), nn.Linear(4, 2), 0
        self.first.requires_grad_(False)
    def forward(self, x):
        self.num += self.training
        self.first.requires_grad_(self.num > 3)
        return self.last(self.first(x))
def model(): return Unfrozen()
def optimizer(model): return torch.optim.SGD(model.parameters(), 0.1)
"""
REENTRANT = """
from torch.utils.checkpoint import checkpoint
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.next, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
    def forward(self, x):
        x = self.first(x)
        return self.last(sum(checkpoint(self.next, k * x, use_reentrant=True) for k in (1, 2)))
def model(): return Twice()
"""
MIXED = """
class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 2)
    def forward(self, x): return self.last(self.first(x.bfloat16()).float())
def model(): return Mixed()
"""
PENALTY = """
def training_step(model, batch):
    x, y = batch
    x = x.clone().requires_grad_()
    loss = nn.functional.cross_entropy(model(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.pow(2).mean()
"""
TOKENS = f"""{NET}
def data(split):
    y = torch.randint(0, 2, (60, 8))
    for number, row in enumerate(y): row[1 + number % 8:] = -100
    return torch.randn(60, 8, 4), y
def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=-100)
"""


def spec_of(strategy: str, source: str, **changes):
    values = {"num_epochs": 2, "batch_size": BATCH}
    return runs.spec_of(strategy, source=source, **values | changes)


def trained_job(state, folder, spec):
    """Train a run. Return the report and the weights that rank 0 evaluated."""
    kept: list[dict] = []

    def keep(model):
        kept.append({name: each.detach().clone() for name, each in model.named_parameters()})

    here = Surroundings(state=state, folder=folder)
    report = loop.train(spec, here, publish=id, should_stop=lambda: False, keep=keep)
    return report, kept


def check_job(state, folder, path, spec):
    return validation.validate(spec, Surroundings(state=state, folder=path))


def plainly_trained(spec, num_ranks: int = 1) -> nn.Module:
    """Train in plain torch. Average the gradients of ``num_ranks`` parts of each batch."""
    torch.manual_seed(spec.data_seed)
    task = cell_task(spec.source, {}, "<cell>")
    torch.manual_seed(spec.seed)
    model = task.model()
    made = task.optimizer and task.optimizer([*model.parameters()])
    optimizer = made or torch.optim.SGD(model.parameters(), spec.learning_rate)
    if hasattr(optimizer, "train"):
        optimizer.train()
    for epoch in range(int(spec.num_epochs)):
        order = torch.randperm(60, generator=torch.Generator().manual_seed(spec.seed + epoch))
        for numbers in order.split(BATCH):
            optimizer.zero_grad()
            for part in range(num_ranks):
                batch = task.train.fetch(numbers[part::num_ranks])
                (task.step(model, batch) / num_ranks).backward()
            optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return model


def weights_of(results) -> dict[str, torch.Tensor]:
    return results[0][1][0]


def same(found: dict[str, torch.Tensor], expected: nn.Module) -> bool:
    pairs = [(found[name], each) for name, each in expected.named_parameters()]
    return all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in pairs)


@pytest.mark.parametrize("source", [DROPS, WINDOWS], ids=["drops", "windows"])
def test_batches_are_counted_by_their_rows(ranks, source):
    expected = plainly_trained(spec_of("single", source))
    torch.manual_seed(spec_of("single", source).data_seed)
    inputs, targets = (held := cell_task(source, {}, "<cell>").held_out).fetch(torch.arange(20))
    for first in (20, 40):  # scores are computed on batches of the same size
        more = held.fetch(torch.arange(first, first + 20))
        inputs, targets = torch.cat([inputs, more[0]]), torch.cat([targets, more[1]])
    for strategy, options in [("single", {}), ("dp", {}), ("single", {"accumulate": 3})]:
        results = ranks(2).call(trained_job, spec_of(strategy, source, **options))
        assert same(weights_of(results), expected), strategy
        report = results[0][0]
        with torch.no_grad():
            outputs = expected(inputs)
        right = (outputs.argmax(1) == targets).double().mean().item()
        assert report.num_held_out == len(targets)
        assert report.held_out_accuracy == pytest.approx(right)
        assert report.held_out_loss == pytest.approx(
            nn.functional.cross_entropy(outputs, targets).item(), abs=1e-6
        )
        assert "samples of 120 items" in " ".join(report.notes)
    averaged = ranks(2).call(trained_job, spec_of("ddp", source))
    assert same(weights_of(averaged), plainly_trained(spec_of("ddp", source), 2))


def test_a_batch_without_samples_is_one_sentence(ranks):
    source = DROPS.replace(
        "return torch.stack", "return torch.ones(0, 4), torch.ones(0).long()\n    #"
    )
    with pytest.raises(RankFailedError) as caught:
        ranks(1).call(trained_job, spec_of("single", source))
    assert "collate_fn dropped all 20 items" in str(caught.value.cause)


@pytest.mark.parametrize(
    ("kind", "strategy", "accumulate"),
    [("dataclass", "dp", 2), ("slots", "fsdp", 2), ("namespace", "single", 4)],
)
def test_objects_are_cut_into_micro_batches(ranks, kind, strategy, accumulate):
    source = NET + IN_OBJECTS.replace("KIND", repr(kind))
    expected = plainly_trained(spec_of("single", source.replace("MOST", "20")))
    cut = spec_of(strategy, source.replace("MOST", "5"), accumulate=accumulate)
    results = ranks(2).call(trained_job, cut)
    assert same(weights_of(results), expected)


SMALL = f"{NET}{ROWS.replace('200', '60').replace('50', '60')}"


@pytest.mark.parametrize(
    ("grow", "strategy"),
    [
        *(("growing", strategy) for strategy in ("ddp", "zero", "fsdp", "dp", "local-sgd")),
        *(("registered", strategy) for strategy in ("single", "dp")),
        *(("not saved", strategy) for strategy in ("ddp", "fsdp")),
    ],
)
def test_steps_may_add_buffers_or_change_their_sizes(ranks, grow, strategy):
    source = SMALL + BUFFERS.replace("GROW", GROW[grow])
    (report, kept), *_ = ranks(2).call(trained_job, spec_of(strategy, source, num_epochs=4))
    assert len(report.evaluations) > 2
    if strategy != "local-sgd":
        assert same(kept[0], plainly_trained(spec_of("single", source, num_epochs=4)))


@pytest.mark.parametrize(
    ("made", "strategy"),
    [
        *(("scripted", strategy) for strategy in ("zero", "dp", "async")),
        *(("traced", strategy) for strategy in ("ddp", "dp")),
        ("within a model", "fsdp"),
    ],
)
def test_torchscript_trains(ranks, tmp_path, made, strategy):
    source = SMALL.replace("def model", "def plain") + f"\ndef model(): return {SCRIPTS[made]}"
    spec = spec_of(strategy, source)
    if strategy == "fsdp":
        with pytest.raises(RankFailedError) as caught:
            ranks(2).call(check_job, tmp_path, spec)
        assert "fsdp cannot wrap TorchScript" in str(caught.value.cause)
        return
    ranks(2).call(check_job, tmp_path, spec)
    results = ranks(1 if strategy == "async" else 2).call(trained_job, spec)
    assert same(weights_of(results), plainly_trained(spec))


@pytest.mark.parametrize(
    ("kind", "num_ranks"), [*((kind, 2) for kind in OPTIMIZERS), ("wraps two", 5)]
)
def test_zero_shards_any_optimizer(ranks, kind, num_ranks):
    spec = spec_of("zero", SMALL + OPTIMIZERS[kind])
    results = ranks(num_ranks).call(trained_job, spec)
    assert same(weights_of(results), plainly_trained(spec))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "dp", "async"])
def test_optimizers_with_eval_are_switched(ranks, strategy):
    spec = spec_of(strategy, SMALL + AVERAGING)
    (report, kept), *_ = ranks(2).call(trained_job, spec)
    expected = plainly_trained(spec)
    assert strategy == "async" or same(kept[0], expected)
    assert math.isfinite(report.held_out_loss)


@pytest.mark.parametrize(
    ("strategy", "differs", "frozen"),
    [("ddp", True, True), ("zero", True, True), ("fsdp", False, True), ("dp", False, False)],
)
def test_a_layer_unfrozen_in_the_middle_is_named(ranks, strategy, differs, frozen):
    (report, _), *_ = ranks(2).call(trained_job, spec_of(strategy, SMALL + UNFROZEN, num_epochs=3))
    said = " ".join(report.warnings)
    assert ("replicas differ" in said, "was frozen when" in said) == (differs, frozen), said


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "local-sgd", "gossip"])
def test_replicas_of_a_usual_model_do_not_differ(ranks, strategy):
    results = ranks(2).call(trained_job, spec_of(strategy, CELL))
    assert [report.notes + report.warnings for report, _ in results] == [(), ()]


@pytest.mark.parametrize(
    ("strategy", "source", "said"),
    [
        ("ddp", REENTRANT, "use_reentrant=False"),
        ("zero", MIXED, "Use one data type"),
        ("fsdp", MIXED, "Use one data type"),
        ("fsdp", PENALTY, "second derivative"),
        ("zero", REENTRANT, "use_reentrant=False"),
        ("zero", AVERAGING, "cannot call eval()"),
    ],
)
def test_what_a_strategy_cannot_train_is_found_before_anything_trains(
    fresh_ranks, tmp_path, strategy, source, said
):
    found = fresh_ranks(2).attempt(check_job, tmp_path, spec_of(strategy, SMALL + source))
    causes = [each.cause for each in found if isinstance(each, RankFailedError)]
    assert isinstance(causes[0], UserError)
    assert len(str(causes[0])) < 600
    assert said in str(causes[0])


@pytest.mark.parametrize(
    ("strategy", "source", "accumulate"),
    [("local-sgd", TOKENS, 1), ("dp", TOKENS, 2), ("ddp", DROPS, 1)],
)
def test_a_loss_that_is_no_mean_over_halves_is_named(ranks, tmp_path, strategy, source, accumulate):
    spec = spec_of(strategy, source, accumulate=accumulate)
    assert "mean of its halves" in ranks(2).call(check_job, tmp_path, spec)[0].notes[0]
    gathered = ranks(2).call(check_job, tmp_path, spec_of("dp", source))[0]
    assert gathered.notes == ()  # dp computes one loss of all outputs
    alone = ranks(2).call(check_job, tmp_path, spec_of("single", source))[0]
    usual = ranks(2).call(check_job, tmp_path, spec_of(strategy, SMALL))[0]
    assert (alone.notes, usual.notes) == ((), ())


def slowed_job(state, folder, spec):
    """Train with settings that a cell has left, and return the settings during and after it."""
    note_start()
    torch.autograd.set_detect_anomaly(True)
    torch.set_default_dtype(torch.float64)
    try:
        report, _ = trained_job(state, folder, spec)
        return report.held_out_metrics, torch.is_anomaly_enabled()
    finally:
        torch.autograd.set_detect_anomaly(False)
        torch.set_default_dtype(torch.float32)


def test_a_run_has_the_settings_of_its_cell_and_none_of_earlier_cells(ranks):
    source = f"""{SMALL}
torch.set_float32_matmul_precision("high")
def validation_step(model, batch):
    is_high = torch.get_float32_matmul_precision() == "high"
    is_slow, size = torch.is_anomaly_enabled(), torch.ones(1).itemsize
    return {{"slow": is_slow, "size": size, "high": is_high}}
"""
    spec = spec_of("ddp", source, run_id="slowed-1")
    for _ in range(2):  # the cell runs only once for a comparison
        found, is_kept = ranks(2).call(slowed_job, spec)[0]
        assert found == {"slow": 0, "size": 4, "high": 1}
        assert is_kept
    assert torch.get_float32_matmul_precision() == "highest"
