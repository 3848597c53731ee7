"""Whatever a cell defines, every strategy trains it: any batch, any step, any measure."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Mark, RunHeader, RunSpec, StepEvent
from ddpnb.rank.training import loop
from ddpnb.rank.training.context import build_context
from tests.rank.ranks import RankFailedError, make_state
from tests.rank.test_options import train_job

SHORT = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

def data(split):
    x = torch.randn(100 if split == "train" else 30, 4)
    return x, (x.sum(dim=1) > 0).long()
"""
GENERAL = (
    SHORT.replace(
        "return x, (x.sum(dim=1) > 0).long()",
        'return {"x": (x[:, :2], x[:, 2:]), "y": (x.sum(dim=1) > 0).long()}',
    )
    + """
def training_step(model, batch):
    scores = model(torch.cat(batch["x"], dim=1))
    right = (scores.argmax(dim=1) == batch["y"]).double().mean()
    return {"loss": nn.functional.cross_entropy(scores, batch["y"]), "right": right}
"""
)
RAGGED = """
import torch
from torch import nn

class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.last = nn.EmbeddingBag(20, 8), nn.Linear(8, 2)
    def forward(self, words, starts):
        return self.last(self.words(words, starts))

def model():
    return Text()

def data(split):
    return [(list(range(n % 5 + 1)), n % 2, f"text {n}") for n in range(40)]

def collate_fn(items):
    texts, labels, names = zip(*items)
    starts = torch.tensor([0, *map(len, texts)]).cumsum(0)[:-1]
    return {"words": torch.tensor(sum(texts, [])), "starts": starts, "y": torch.tensor(labels),
            "names": names}

def training_step(model, batch):
    assert len(batch["names"]) == len(batch["y"])
    return nn.functional.cross_entropy(model(batch["words"], batch["starts"]), batch["y"])
"""
WEAK = {"no-comm", "local-sgd", "diloco", "gossip", "async", "hogwild"}
"""Strategies that do not make exactly the updates of one process on several ranks."""


def spec_of(strategy: str, source: str = SHORT, **changes) -> RunSpec:
    values = {"run_id": "run-1", "num_epochs": 1, "batch_size": 20, "source": source}
    return RunSpec(strategy=strategy, **values | changes)


def train_under_a_default_device(state, folder, spec):
    """What the cell itself makes says where; what ddpnb makes must not end up on the default."""
    torch.set_default_device("meta")
    try:
        return train_job(state, folder, spec)
    finally:
        torch.set_default_device(None)


def total_losses(results) -> list[float]:
    """The mean loss of each global batch, over all workers."""
    by_step: dict[int, list[StepEvent]] = {}
    for _, events in results:
        for event in events:
            if isinstance(event, StepEvent):
                by_step.setdefault(event.step, []).append(event)
    return [
        sum(e.loss * e.num_samples for e in events) / sum(e.num_samples for e in events)
        for _, events in sorted(by_step.items())
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_on_a_dict_trains_exactly_as_the_shorthand(ranks, strategy):
    for num_ranks in (1, 2):
        short, general = (
            ranks(num_ranks).call(train_job, spec_of(strategy, source, accumulate=2))
            for source in (SHORT, GENERAL)
        )
        if num_ranks == 1 or strategy not in WEAK:
            assert total_losses(general) == pytest.approx(total_losses(short), abs=1e-6)
            assert general[0][0].held_out_loss == pytest.approx(short[0][0].held_out_loss, abs=1e-6)
        assert short[0][0].held_out_accuracy > 0.4
        assert math.isnan(general[0][0].held_out_accuracy)
        shares = [e.metrics["right"] for _, es in general for e in es if isinstance(e, StepEvent)]
        assert len(shares) >= 5
        assert all(0 <= share <= 1 for share in shares)


CLOSURE = SHORT.replace(
    "def model():\n    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))\n",
    """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.lock = nn.Linear(4, 16), nn.Linear(16, 2), Lock()
        self.run = lambda inputs: self.last(torch.tanh(self.first(inputs)))
    def forward(self, inputs):
        return self.run(inputs)
def model():
    return Block()
""",
).replace("import torch\n", "import torch\nfrom threading import Lock\n", 1)
"""Its layers are called by a function that holds this very module, and it has a lock."""
NAMED = "\ndef optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.05)\n"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer", ["", NAMED])
def test_layers_that_a_closure_calls_are_trained(ranks, strategy, optimizer):
    plain, closed = (
        ranks(2).call(train_job, spec_of(strategy, source + optimizer, num_epochs=3))
        for source in (SHORT, CLOSURE)
    )
    if strategy not in WEAK:
        assert total_losses(closed) == pytest.approx(total_losses(plain), abs=1e-6)
        assert closed[0][0].held_out_loss == pytest.approx(plain[0][0].held_out_loss, abs=1e-6)
    assert closed[0][0].final_loss < total_losses(closed)[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_default_device_of_the_users_is_for_the_users_own_tensors(ranks, strategy):
    source = SHORT.replace("nn.Linear(4, 16)", 'nn.Linear(4, 16, device="cpu")')
    source = source.replace("nn.Linear(16, 2)", 'nn.Linear(16, 2, device="cpu")')
    source = source.replace("30, 4)", '30, 4, device="cpu")')
    found = ranks(2).call(train_under_a_default_device, spec_of(strategy, source))
    usual = ranks(2).call(train_job, spec_of(strategy, source))
    if strategy not in WEAK:
        assert total_losses(found) == total_losses(usual)
    assert math.isfinite(found[0][0].held_out_loss)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_items_without_rows_are_collated_part_by_part(ranks, strategy):
    alone = total_losses(ranks(1).call(train_job, spec_of("single", RAGGED)))
    for num_ranks in (1, 2):
        found = ranks(num_ranks).call(train_job, spec_of(strategy, RAGGED, accumulate=2))
        if num_ranks == 1 or strategy not in WEAK:
            assert total_losses(found) == pytest.approx(alone, abs=1e-5)
        assert math.isfinite(found[0][0].held_out_loss)


@pytest.mark.parametrize(("kind", "is_right"), [("mean", True), ("sum", False)])
def test_a_batch_without_rows_is_checked_for_a_sum(ranks, kind, is_right):
    source = RAGGED.replace('), batch["y"])', f'), batch["y"], reduction="{kind}")')
    found = ranks(1).attempt(check_job, spec_of("single", source))[0]
    assert isinstance(getattr(found, "cause", None), UserError) == (not is_right)


LOADER = (
    SHORT.partition("def data")[0]
    + """
from torch.utils.data import DataLoader
class Own:
    def __len__(self): return 40
    def __getitem__(self, i): return {"x": torch.full((4,), i / 40), "y": i % 2, "name": f"n{i}"}
def data(split):
    return DataLoader(Own(), batch_size=7, shuffle=True)
def training_step(model, batch):
    assert len(batch["name"]) == len(batch["x"])
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])
"""
)


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp"])
def test_of_a_loader_the_data_set_is_taken(ranks, strategy):
    report, events = ranks(2).call(train_job, spec_of(strategy, LOADER, accumulate=2))[0]
    (header,) = [event for event in events if isinstance(event, RunHeader)]
    assert header.num_samples == 40
    assert math.isfinite(report.held_out_loss)


SAMPLED = (
    SHORT.partition("def data")[0]
    + """
from torch.utils.data import *
def data(split):
    samples = [(torch.full((4,), float(n)), 0) for n in range(40)]
    half = range(0, 40, 2) if split == "train" else range(1, 40, 2)
    weights = [0.0] * 30 + [1.0] * 10
    test = DataLoader(samples, sampler=SubsetRandomSampler(range(1, 40, 2)))
    return DataLoader(samples, {train}) if split == "train" else test
def training_step(model, batch):
    seen = sorted({{int(n) for n in batch[0][:, 0]}})
    loss = model(batch[0] / 40).square().mean()
    return {{"loss": loss, "least": seen[0], "even": sum(n % 2 == 0 for n in seen) / len(seen)}}
def validation_step(model, batch):
    return {{"odd": (batch[0][:, 0] % 2).mean()}}
"""
)
SAMPLERS = {
    "subset": ("sampler=SubsetRandomSampler(half)", 20, (0, 1.0)),
    "weights": ("sampler=WeightedRandomSampler(weights, 60)", 60, (30, None)),
    "replacement": ("sampler=RandomSampler(samples, replacement=True, num_samples=50)", 50, None),
    "few": ("sampler=RandomSampler(samples, num_samples=10)", 10, None),
}


@pytest.mark.parametrize(("train", "num_samples", "expected"), SAMPLERS.values(), ids=SAMPLERS)
def test_what_a_sampler_chooses_is_trained_on_by_all_strategies(
    ranks, train, num_samples, expected
):
    source, found = SAMPLED.format(train=train), []
    for strategy in ("single", "dp", "ddp"):
        (report, events), *others = ranks(2).call(
            train_job, spec_of(strategy, source, batch_size=10, accumulate=2)
        )
        (header,) = [event for event in events if isinstance(event, RunHeader)]
        assert header.num_samples == num_samples
        assert report.held_out_metrics == {"odd": 1}
        assert report.num_held_out == 20
        steps = [each for each in events if isinstance(each, StepEvent)]
        if expected is not None:
            least, even = expected
            assert all(step.metrics["least"] >= least for step in steps)
            assert even is None or all(step.metrics["even"] == even for step in steps)
        found.append(total_losses([(report, events), *others]))
    assert found[1] == pytest.approx(found[0], abs=1e-6)
    assert found[2] == pytest.approx(found[0], abs=1e-6)


STREAM = LOADER.replace(
    "class Own:\n    def __len__(self): return 40\n    def __getitem__(self, i): return ",
    "class Own(torch.utils.data.IterableDataset):\n    def __len__(self): return 40\n"
    "    def __iter__(self):\n        for i in range(10**9): yield ",
).replace("DataLoader(Own(), batch_size=7, shuffle=True)", "Own()")


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_stream_with_a_length_is_read_once_and_a_note_says_so(ranks, strategy):
    same, _ = ranks(2).call(train_job, spec_of(strategy, LOADER))[0]
    report, events = ranks(2).call(train_job, spec_of(strategy, STREAM))[0]
    (header,) = [event for event in events if isinstance(event, RunHeader)]
    assert any("read whole into memory" in note for note in header.notes)
    assert (header.num_samples, report.final_loss) == (40, same.final_loss)


TUPLES = (
    SHORT.partition("def model")[0]
    + """
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 1)
    def forward(self, inputs):
        return self.last(inputs), inputs.sum()
def model(): return Both()
def data(split):
    x = torch.randn(100, 4)
    return x, (x.sum(dim=1) > 0).float()
def loss(outputs, targets):
    return nn.functional.binary_cross_entropy_with_logits(outputs[0][:, 0], targets)
def metric(outputs, targets):
    return {"f1": torch.tensor(0.25), "size": len(outputs[0]) + len(targets)}
"""
)


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "fsdp", "async"])
def test_with_a_loss_of_ones_own_the_model_returns_anything(ranks, strategy):
    (one, _), *_ = ranks(1).call(train_job, spec_of("single", TUPLES))
    report, _ = ranks(2).call(train_job, spec_of(strategy, TUPLES))[0]
    if strategy != "async":
        assert report.held_out_loss == pytest.approx(one.held_out_loss, abs=1e-6)
    assert math.isnan(report.held_out_accuracy)
    assert report.held_out_metrics == {"f1": 0.25, "size": 200.0}


def test_a_validation_step_is_averaged_over_the_samples_and_may_hold_the_loss(ranks):
    source = SHORT + (
        "def validation_step(model, batch):\n"
        "    assert not model.training and not torch.is_grad_enabled()\n"
        "    return {'loss': 3.0, 'size': torch.tensor(len(batch[0]))}\n"
    )
    report, _ = ranks(1).call(train_job, spec_of("single", source))[0]
    assert report.held_out_loss == 3.0
    assert report.held_out_metrics == {"size": pytest.approx((20 * 20 + 10 * 10) / 30)}
    assert math.isnan(report.held_out_accuracy)
    assert report.final_loss < 1


def test_a_metric_gets_what_a_validation_step_returns_of_a_dict(ranks):
    source = GENERAL + (
        "def metric(outputs, targets):\n"
        "    return {'number': len(outputs) + len(targets), 'ones': outputs.mean()}\n"
    )
    with pytest.raises(RankFailedError) as caught:
        ranks(1).call(check_job, spec_of("single", source))
    assert isinstance(caught.value.cause, UserError)
    assert "validation_step(model, batch) return (outputs, targets)" in str(caught.value.cause)
    source += "def validation_step(model, batch): return torch.ones(len(batch['y'])), batch['y']\n"
    report, _ = ranks(1).call(train_job, spec_of("single", source))[0]
    assert report.held_out_metrics == {"number": 60, "ones": 1}
    assert math.isfinite(report.held_out_loss)


MIXTURE = """
import torch
from torch import nn

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 2) for _ in range(3)])
    def forward(self, inputs):
        return self.experts[int(inputs[0, 0] > 0)](inputs)  # one of two; the third is never used

def model(): return Mixture()

def data(split):
    x = torch.randn(60, 4)
    return x, (x.sum(dim=1) > 0).long()
"""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_mixture_of_experts_trains_where_unused_parameters_are_allowed(ranks, strategy):
    refusals = {
        "ddp": "no part in the loss.*, or compare ddp:find_unused_parameters=on",
        "ddp-shm": "or compare ddp:find_unused_parameters=on",
        "zero": "or compare ddp:find_unused_parameters=on",
        "fsdp": r"experts\.\d\.weight had no part in a step: use every layer, or leave fsdp out",
    }
    if strategy in refusals:
        with pytest.raises(UserError, match=refusals[strategy]):
            loop.validate(spec_of(strategy, MIXTURE), state=make_state(0, 2), namespace={})
    if strategy in ("ddp-shm", "zero", "fsdp"):
        return
    word = "ddp:find_unused_parameters=on" if strategy == "ddp" else strategy
    loop.validate(spec_of(word, MIXTURE), state=make_state(0, 2), namespace={})
    report, _ = ranks(2).call(train_job, spec_of(word, MIXTURE))[0]
    assert math.isfinite(report.final_loss)


IN_GROUPS = (
    SHORT
    + """
def optimizer(model, num_steps):
    groups = [
        {"params": [p for name, p in model.named_parameters() if "bias" in name], "lr": 0.02},
        {"params": [p for name, p in model.named_parameters() if "bias" not in name]},
    ]
    made = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return made, torch.optim.lr_scheduler.OneCycleLR(made, max_lr=[0.1, 0.5], total_steps=num_steps)
"""
)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_by_name_and_a_scheduler_go_wherever_the_optimizer_lives(ranks, strategy):
    alone = ranks(1).call(train_job, spec_of("single", IN_GROUPS, num_epochs=3))
    plain = ranks(1).call(train_job, spec_of("single", num_epochs=3))
    assert total_losses(alone)[-5:] != pytest.approx(total_losses(plain)[-5:], abs=1e-3)
    for num_ranks in (1, 2):
        found = ranks(num_ranks).call(train_job, spec_of(strategy, IN_GROUPS, num_epochs=3))
        has_momentum = strategy == "diloco"  # of its outer step
        if not has_momentum and (num_ranks == 1 or strategy not in WEAK):
            assert total_losses(found) == pytest.approx(total_losses(alone), abs=1e-5)
        assert found[0][0].held_out_loss < 0.6


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero", "fsdp", "central", "async"])
def test_a_schedule_is_resumed_where_it_was(ranks, tmp_path, strategy):
    cell = IN_GROUPS.replace("total_steps=num_steps", "total_steps=20")
    spec = spec_of(strategy, cell, num_epochs=2, checkpoints=str(tmp_path))
    num_ranks = 1 if strategy == "async" else 2
    whole = total_losses(ranks(num_ranks).call(train_job, replace(spec, num_epochs=4)))
    first = replace(spec, run_id="old", save_every=1)
    ranks(num_ranks).call(train_job, first)
    second = replace(spec, run_id="new", resume="old", num_epochs=4)
    assert total_losses(ranks(num_ranks).call(train_job, second)) == pytest.approx(
        whole[10:], abs=1e-5
    )


def rates_of(lines: str) -> list[float]:
    """The learning rates of six updates of a cell's optimizer, two in an epoch."""
    spec = spec_of("single", SHORT + lines, batch_size=50, num_epochs=3)
    context = build_context(spec, make_state(0, 1), {}, filename="here")
    replica = context.worker("t", num_steps=6)
    optimizer, rates = replica.optimizer(replica.parameters), []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    for _ in range(6):
        optimizer.step()
    return rates


HALVING = (
    "def optimizer(params):\n"
    "    made = torch.optim.SGD(params, lr=0.8)\n"
    "    halving = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)\n"
    "    return {}"
)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("made", [0.8] * 6),
        ("made, halving", [0.8, 0.4, 0.2, 0.1, 0.05, 0.025]),
        ("[made], [halving]", [0.8, 0.4, 0.2, 0.1, 0.05, 0.025]),
        ("{'optimizer': made}", [0.8] * 6),
        ("{'optimizer': made, 'lr_scheduler': halving}", [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]),
        (
            "{'optimizer': made, 'lr_scheduler': {'scheduler': halving, 'interval': 'step', "
            "'frequency': 2}}",
            [0.8, 0.8, 0.4, 0.4, 0.2, 0.2],
        ),
    ],
)
def test_all_that_lightning_takes_sets_the_rate(returned, expected):
    assert rates_of(HALVING.replace("{}", returned)) == pytest.approx(expected)


def test_a_scheduler_steps_once_where_the_optimizers_step_calls_its_parents():
    torch.optim.SGD([torch.ones(1)])  # once its parent has been used, torch calls the hooks of both
    own = (
        "class Own(torch.optim.SGD):\n"
        "    def step(self, closure=None): return super().step(closure)\n"
    )
    lines = own + HALVING.replace("torch.optim.SGD", "Own").replace("{}", "made, halving")
    rates = rates_of(lines)  # its own hook, too, is called twice
    assert rates[::2] == pytest.approx([0.8, 0.4, 0.2, 0.1, 0.05, 0.025])


GAN = """
import torch
from torch import nn

def model():
    return nn.ModuleDict({"make": nn.Linear(2, 4), "judge": nn.Linear(4, 1)})

def data(split):
    return torch.randn(60 if split == "train" else 20, 4)

class Gan:
    def setup(self, replica):
        self.replica, self.model = replica, replica.model
        self.averaged = [p.detach().clone() for p in self.model["make"].parameters()]
        self.optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in
                           (self.model["make"], self.model["judge"])]

    def step(self, batch):
        real = batch.tree
        made = self.model["make"](torch.randn(len(real), 2))
        bce = nn.functional.binary_cross_entropy_with_logits
        judged = self.model["judge"](torch.cat([real, made.detach()]))
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        self.update(1, bce(judged, truth))
        loss = bce(self.model["judge"](made), torch.ones(len(made), 1))
        self.update(0, loss)
        for mean, parameter in zip(self.averaged, self.model["make"].parameters()):
            mean.lerp_(parameter.detach(), 0.1)
        return loss

    def update(self, number, loss):
        self.model.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)
        self.optimizers[number].step()

    def finish(self):
        return self.model
"""


def check_job(state, folder, spec):
    return loop.validate(spec, state=state, namespace={}, folder=folder)


def test_a_class_of_ones_own_needs_neither_loss_nor_optimizer(ranks):
    spec = spec_of("Gan", GAN)
    assert [each.num_samples for each in ranks(2).call(check_job, spec)] == [60, 60]
    (report, events), _ = ranks(2).call(train_job, spec)
    assert all(0 < loss < 3 for loss in total_losses([(report, events)]))
    assert math.isnan(report.held_out_loss)
    assert not [event for event in events if isinstance(event, Mark)]
    measured = GAN + "def validation_step(model, batch): return {'judged': 0.5, 'loss': 1.0}"
    (report, _), _ = ranks(2).call(train_job, spec_of("Gan", measured))
    assert (report.held_out_loss, report.held_out_metrics) == (1.0, {"judged": 0.5})


def test_what_is_wrong_in_it_is_found_before_anything_trains(ranks):
    for old, new, error in (
        ("return loss", "return None", r"Gan.step\(batch\) returned None; return the mean loss"),
        ("self.optimizers = ", "self.optimisers = ", "has no attribute 'optimizers'"),
    ):
        with pytest.raises(RankFailedError, match=error):
            ranks(2).call(check_job, spec_of("Gan", GAN.replace(old, new)))


MEETS = (
    SHORT
    + """
class Meets:
    def setup(self, replica):
        self.replica = replica
        self.optimizer = replica.optimizer(replica.parameters)
        (replica.folder / f"{replica.name}-{replica.rank}").touch()
        torch.distributed.barrier()
        assert (replica.folder / f"{replica.name}-{1 - replica.rank}").exists()

    def step(self, batch):
        weights = torch.tensor([batch.weight, batch.num_samples], dtype=torch.double)
        assert 0 < batch.weight < 1
        torch.distributed.all_reduce(weights)
        assert weights.tolist() == [1, batch.num_global], weights
        return self.replica.compute_gradients(batch)

    def finish(self): pass
"""
)


def test_a_class_of_ones_own_is_checked_in_a_shared_folder_and_with_its_weights(ranks, tmp_path):
    spec = spec_of("Meets", MEETS, batch_size=21)
    ranks(2).call(check_in_job, str(tmp_path), spec)
    made = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parts[0] for path in made} == {loop.CHECKS}
    assert len(made) == 2


def check_in_job(state, folder, path, spec):
    return check_job(state, Path(path), spec)


def test_a_step_that_returns_nothing_later_on_is_one_sentence(ranks):
    step = '    return {"loss"'
    source = GENERAL.replace(step, f"    if len(scores) == 20: return\n{step}")
    with pytest.raises(
        RankFailedError, match=r"training_step\(model, batch\) returned None; return"
    ):
        ranks(1).call(train_job, spec_of("single", source))
