"""Every mistake in a comparison cell is reported in one sentence before anything trains."""

import traceback
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.tasks import forget
from ddpnb.rank.tasks.cell import cell_task
from ddpnb.rank.training import validation
from ddpnb.rank.training.evaluation import number_of
from tests.rank.ranks import make_state
from tests.rank.sources import DATA, GOOD, MODEL, STEP

NO_NAMES = MappingProxyType({})


def check(source: str, strategy: str = "ddp", num_ranks: int = 2, names=NO_NAMES, **choices):
    spec = RunSpec(run_id="r", strategy=strategy, source=source, **{"batch_size": 10} | choices)
    return validation.validate(spec, state=make_state(0, num_ranks), namespace=names)


def fails(match: str):
    return pytest.raises(UserError, match=match)


ITEMS = """
class Own(torch.utils.data.{kind}):
    def __len__(self): return 20
    def __getitem__(self, i): return {item}
def data(split): return Own()
"""
OWN_STEP = GOOD + STEP
GOOD_CELLS = {
    "plain": GOOD,
    "arrays": MODEL + "import numpy as np\nx = np.ones((20, 4), dtype=np.float32)\n"
    "x.flags.writeable = False\ndef data(split): return x, np.zeros(20, dtype=np.int64)",
    "TensorDataset": MODEL + "from torch.utils.data import *\n"
    "def data(split): return TensorDataset(torch.randn(20, 4), torch.zeros(20).long())",
    "Dataset": MODEL + ITEMS.format(kind="Dataset", item="(torch.randn(4), i % 3)"),
    "list": MODEL + "def data(split): return [(torch.randn(4), i % 3) for i in range(20)]",
    "loader": MODEL + "from torch.utils.data import *\n"
    "def data(split): return DataLoader([(torch.randn(4), i % 3) for i in range(20)], 7)",
    "dict": OWN_STEP.replace("return nn.f", "return {'a': 0.5, 'loss': nn.f") + "}",
    "gradient penalty": OWN_STEP.replace(
        "    return nn",
        "    inputs = inputs.clone().requires_grad_()\n"
        "    slope, = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)\n"
        "    return slope.square().mean() + nn",
    ),
    "outputs with attributes": OWN_STEP.replace(
        "    return nn.functional.cross_entropy(model(inputs), targets)",
        "    from collections import OrderedDict\n"
        "    class Outputs(OrderedDict): pass  # as those of transformers\n"
        "    logits = model(inputs)\n"
        "    return Outputs(loss=nn.functional.cross_entropy(logits, targets), logits=logits)",
    ),
    "metric": GOOD + "def metric(outputs, targets): return (outputs.argmax(1) == targets).sum()",
    "validation step": OWN_STEP + "def validation_step(model, batch): return {'f1': 0.5}",
    "infinite loss": GOOD + "loss = lambda outputs, targets: outputs.square().mean() * 1e39",
    "loss of rounding alone": GOOD
    + "def loss(outputs, targets): return (outputs * 1e-9).square().sum()",
    "scheduler": GOOD + "def optimizer(params):\n    made = torch.optim.SGD(params, lr=0.1)\n"
    "    return made, torch.optim.lr_scheduler.StepLR(made, 3)",
}


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
@pytest.mark.parametrize("source", GOOD_CELLS.values(), ids=GOOD_CELLS)
@pytest.mark.filterwarnings("error::UserWarning")
def test_anything_that_trains_passes(source, strategy):
    assert check(source, strategy, accumulate=2).num_samples == 20


@pytest.mark.parametrize("task", ["digits", "synthetic"])
def test_built_in_tasks_pass(task):
    spec = RunSpec(run_id="r", strategy="ddp", task=task)
    assert validation.validate(spec, state=make_state(0, 2), namespace={}).has_accuracy


SIZED = (
    "def optimizer(model):\n    made = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "    return made, torch.optim.lr_scheduler.{}"
)
LOADER = (
    GOOD + "from torch.utils.data import *\n"
    "class Own(SequentialSampler): pass\n"
    "samples, weights = [(torch.randn(4), i % 3) for i in range(20)], [1.0] * 20\n"
    "def data(split): return DataLoader(samples, {})"
)
BAD_CELLS = {
    "no model": ("import torch\n" + DATA, "model"),
    "no data": (MODEL, "data"),
    "model is no function": ("import torch\nmodel = 3\n" + DATA, "model"),
    "model is a module": (GOOD + "model = nn.Linear(4, 3)", "a Linear"),
    "model returns nothing": (GOOD + "def model(): pass", "returned None"),
    "no parameters": (GOOD + "def model(): return nn.ReLU()", "optimizer .*empty parameter list"),
    "lazy": (GOOD + "def model(): return nn.LazyLinear(3)", "lazy"),
    "wrapped": (
        GOOD + "def model(): return nn.Sequential(nn.DataParallel(nn.Linear(4, 3)))",
        "DataParallel",
    ),
    "unused parameter": (
        GOOD + "class M(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 3)\n"
        "        self.spare = nn.Parameter(torch.ones(1))\n"
        "model = M",
        "spare .*find_unused_parameters",
    ),
    "copied with a closure": (
        GOOD + "import copy\n"
        "class Block(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 3)\n"
        "        self.deep = nn.Linear(3, 3)\n"
        "        self.run = lambda inputs: self.deep(super(Block, self).forward(inputs))\n"
        "    def forward(self, inputs): return self.run(inputs)\n"
        "def model(): return copy.deepcopy(Block())",
        r"Block that run holds.*requires_grad_\(False\)",
    ),
    "loss of another module": (
        GOOD + "head = nn.Linear(3, 3)\n"
        "def loss(outputs, targets): return nn.functional.cross_entropy(head(outputs), targets)",
        "Linear that loss holds",
    ),
    "own batches": (LOADER.format("batch_sampler=[[0, 1], [2]]"), "DataLoader"),
    "own sampler": (LOADER.format("sampler=Own(samples)"), "DataLoader"),
    "weights": (LOADER.format("sampler=WeightedRandomSampler(weights, 20)"), "DataLoader"),
    "drawn samples": (LOADER.format("sampler=RandomSampler(samples, True)"), "DataLoader"),
    "few samples": (LOADER.format("sampler=RandomSampler(samples, num_samples=9)"), "DataLoader"),
    "text": (GOOD + "def data(split): return 'abc'", "a str"),
    "nothing": (GOOD + "def data(split): pass", "None"),
    "three tensors": (GOOD + "def data(split): return (torch.ones(20),) * 3", "tuple of 3"),
    "strings": (GOOD + "def data(split): return ['a'], ['b']", "a list"),
    "unequal": (
        GOOD + "def data(split): return torch.ones(20, 4), torch.ones(19)",
        r"\(20, 4\), \(19,\)",
    ),
    "unequal leaves": (
        OWN_STEP + "def data(split): return {'a': torch.ones(20, 4), 'b': (torch.ones(19),)}",
        r"'b': \(\(19,\),\)",
    ),
    "empty": (
        GOOD + "def data(split):\n"
        "    n = 20 if split == 'train' else 0\n"
        "    return torch.ones(n, 4), torch.ones(n).long()",
        "'test'",
    ),
    "items that do not stack": (
        MODEL + ITEMS.format(kind="Dataset", item="(torch.ones(i % 3 + 1), 1)"),
        r"collate_fn\(items\)",
    ),
    "items of strings": (MODEL + ITEMS.format(kind="Dataset", item="'a', 'b'"), "a tuple"),
    "no length": (
        MODEL + "class Own:\n    def __getitem__(self, i): return torch.ones(4), 1\n"
        "def data(split): return Own()",
        "an Own",
    ),
    "a stream": (
        MODEL + "class Own(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self): return iter([])\n"
        "def data(split): return Own()",
        "an Own",
    ),
    "a dict without a step": (GOOD + "def data(split): return {'x': torch.ones(20, 4)}", "a dict"),
    "collate_fn of tensors": (GOOD + "def collate_fn(items): return items", "collate_fn"),
    "loss is no function": (GOOD + "loss = 0.3", "a float"),
    "loss is a vector": (GOOD + "loss = nn.CrossEntropyLoss(reduction='none')", r"\(5,\)"),
    "loss is a sum": (GOOD + "loss = nn.CrossEntropyLoss(reduction='sum')", "sum"),
    "loss is detached": (
        GOOD + "def loss(o, t): return nn.functional.cross_entropy(o, t).detach()",
        "does not require grad",
    ),
    "loss fails": (GOOD + "loss = nn.MSELoss()", r"loss.* \(5, 3\) .*RuntimeError"),
    "model fails": (GOOD + "def model(): return nn.Linear(5, 3)", r"\(5, 4\): RuntimeError"),
    "one column": (
        GOOD + "def model(): return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))\n"
        "def data(split): return torch.randn(20, 4), torch.rand(20)",
        r"one column, \(5,\)",
    ),
    "test samples of another size": (
        GOOD + "def data(split):\n"
        "    return torch.randn(20, 4 if split == 'train' else 5), torch.randint(3, (20,))",
        "'test'.*RuntimeError",
    ),
    "fails in evaluation mode": (
        GOOD + "class M(nn.Linear):\n"
        "    def forward(self, x): return super().forward(x) if self.training else None\n"
        "def model(): return M(4, 3)",
        "'train'.*TypeError",
    ),
    "step returns nothing": (OWN_STEP.replace("return nn.f", "nn.f"), "None"),
    "step returns a vector": (
        OWN_STEP.replace("targets)\n", "targets, reduction='none')\n"),
        r"training_step.*\(5,\)",
    ),
    "step is a sum": (
        OWN_STEP.replace("targets)\n", "targets, reduction='sum')\n"),
        "training_step.* sum",
    ),
    "no loss": (OWN_STEP.replace("return nn.f", "return {'f1': nn.f") + "}", "'loss'"),
    "a text beside it": (
        OWN_STEP.replace("return nn.f", "return {'f1': 'good', 'loss': nn.f") + "}",
        "'f1'.*a str",
    ),
    "step fails": (
        OWN_STEP.replace("inputs, targets = batch", "inputs = batch['x']"),
        r"training_step.*\(5, 4\).*TypeError",
    ),
    "a method that DDP hides": (
        OWN_STEP.replace("model(inputs)", "model(inputs[:, :model.in_features])"),
        "AttributeError.*'in_features'",
    ),
    "the model that DDP wraps": (
        OWN_STEP.replace("model(inputs)", "getattr(model, 'module', model)(inputs)"),
        r"never calls model\(\.\.\.\)",
    ),
    "metric raises": (
        GOOD + "def metric(outputs, targets): return 1 / 0",
        "'test'.*ZeroDivisionError",
    ),
    "metric returns text": (GOOD + "def metric(outputs, targets): return 'good'", "a str"),
    "metric returns the loss": (
        GOOD + "def metric(outputs, targets): return {'f1': 1.0, 'loss': 2.0}",
        "'loss'",
    ),
    "metric returns a vector": (
        GOOD + "def metric(outputs, targets): return {'f1': outputs.mean(dim=1)}",
        r"'f1'.*\(10,\)",
    ),
    "validation step returns nothing": (
        GOOD + "def validation_step(model, batch): pass",
        "validation_step.*None",
    ),
    "metric of a dict": (
        OWN_STEP.replace("inputs, targets = batch", "inputs, targets = batch['x'], batch['y']")
        + "def data(split): return {'x': torch.ones(20, 4), 'y': torch.ones(20).long()}\n"
        "def metric(outputs, targets): return 1",
        "a dict.*validation_step",
    ),
    "optimizer is no function": (GOOD + "optimizer = 3", "an int"),
    "optimizer returns nothing": (GOOD + "def optimizer(params): pass", "None"),
    "optimizer needs a closure": (GOOD + "optimizer = torch.optim.LBFGS", "TypeError"),
    "optimizer of something else": (
        GOOD + "def optimizer(params, rate): return torch.optim.SGD(params, lr=rate)",
        "TypeError.*rate",
    ),
    "several optimizers": (
        GOOD + "def optimizer(params): return [torch.optim.SGD(params, lr=0.1)] * 3",
        "a list",
    ),
    "a scheduler that wants a metric": (
        GOOD + SIZED.format("ReduceLROnPlateau(made)"),
        "ReduceLROnPlateau",
    ),
    "a scheduler that is too short": (
        GOOD + SIZED.format("OneCycleLR(made, 0.1, total_steps=2)"),
        "4 steps.*ValueError",
    ),
    "no scheduler": (
        GOOD + "def optimizer(params): return torch.optim.SGD(params, lr=0.1), 'cosine'",
        "a str",
    ),
}


@pytest.mark.parametrize(("source", "said"), BAD_CELLS.values(), ids=BAD_CELLS)
def test_each_mistake_is_one_sentence(source, said):
    with fails(said) as caught:
        check(source)
    assert "\n" not in str(caught.value)


NOISY = GOOD + (
    "def training_step(model, batch):\n"
    "    outputs = model(batch[0] + {noise} * torch.randn_like(batch[0]))\n"
    "    return nn.functional.cross_entropy(outputs, batch[1], reduction='{kind}')\n"
)


@pytest.mark.parametrize("noise", [0, 0.2])
def test_a_sum_is_found_whatever_noise_is_drawn(noise):
    check(NOISY.format(noise=noise, kind="mean"), batch_size=20)
    with fails("is a sum"):
        check(NOISY.format(noise=noise, kind="sum"), batch_size=20)


CONTRASTIVE = (
    "def loss(outputs, targets):\n"
    "    scores = outputs @ (outputs.detach() + {noise} * torch.randn_like(outputs)).T\n"
    "    return nn.functional.cross_entropy(scores, torch.arange(len(outputs)))\n"
)
DEPENDENT = (
    CONTRASTIVE.format(noise=0),
    CONTRASTIVE.format(noise=0.1),
    "def loss(outputs, targets): return outputs.var()",
)
INDEPENDENT = (
    "",
    "loss = lambda outputs, targets: (outputs + 0.3 * torch.randn_like(outputs)).square().mean()",
    "def data(split): return torch.randn(18, 4), torch.randint(3, (18,))",
    "def model(): return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout())",
)


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp"])
def test_a_note_says_that_a_loss_depends_on_the_batch(strategy):
    num_expected = 0 if strategy == "single" else 1
    found = [len(check(GOOD + each, strategy).notes) for each in DEPENDENT + INDEPENDENT]
    assert found == [num_expected] * 3 + [0] * 4


def test_batches_that_do_not_fit_are_refused():
    with fails("3 ranks"):
        check(GOOD, "single", num_ranks=3, batch_size=2)
    with fails("20 samples"):
        check(GOOD, batch_size=21)
    with fails(r"22 .* \(20 samples\).*--batch-per-worker"):
        check(GOOD, batch_per_worker=11)


BATCHNORM = GOOD + "def model(): return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))"


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "choices", "is_enough"),
    [
        ("ddp", 2, {"batch_size": 18}, False),  # 20 = 18 + 2: one sample each in the last step
        ("single", 2, {"batch_size": 8, "accumulate": 4}, False),  # 20 = 8 + 8 + 4
        ("ddp", 2, {"accumulate": 4}, False),
        ("dp", 2, {"accumulate": 4}, False),
        ("dp", 4, {}, False),  # DataParallel cuts 10 into 3, 3, 3 and 1
        ("dp", 4, {"batch_size": 20, "accumulate": 3}, False),  # 7, 7, 6; 7 into 2, 2, 2 and 1
        ("single", 2, {"accumulate": 5}, True),
        ("ddp", 2, {"accumulate": 2}, True),
        ("dp", 2, {"batch_size": 20, "accumulate": 3}, True),  # 7, 7, 6, and 7 into 4 and 3
        ("ddp", 4, {}, True),
        ("async", 2, {"accumulate": 2}, True),
    ],
)
def test_the_smallest_batch_of_the_training_is_tried(strategy, num_ranks, choices, is_enough):
    if is_enough:
        check(BATCHNORM, strategy, num_ranks, **choices)
        return
    with fails("batch of 1 samples"):
        check(BATCHNORM, strategy, num_ranks, **choices)


def test_what_the_cell_itself_raises_comes_with_the_cells_lines():
    with pytest.raises(ZeroDivisionError) as caught:
        check(GOOD + "def data(split):\n    return 1 / 0  # here\n")
    assert "return 1 / 0  # here" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(SyntaxError):
        check("def model(:")


def test_names_of_earlier_cells_are_seen_but_not_taken_for_the_cells_own():
    earlier = {"Net": nn.Linear, "torch": torch, "loss": 0.3, "optimizer": 3, "model": nn.ReLU}
    check("def model(): return Net(4, 3)\n" + DATA, names=earlier)
    with fails("model"):
        check("import torch\n" + DATA, names=earlier)
    bound = MODEL.replace("def model(): return nn.Linear(4, 3)", "model = Net") + DATA
    check(bound, names={"Net": lambda: nn.Linear(4, 3)})


@pytest.mark.parametrize("model", ["net", "nn.Sequential(net, nn.Linear(3, 3))"])
def test_a_model_of_the_notebook_is_refused_unless_it_is_copied(model):
    net = nn.Linear(4, 3)
    before = net.weight.clone()
    source = GOOD + f"def model(): return {model}\n"
    with fails(r"copy\.deepcopy"):
        check(source, names={"net": net})
    check("import copy\n" + source.replace("net", "copy.deepcopy(net)"), names={"net": net})
    assert torch.equal(net.weight, before)
    assert net.weight.grad is None


def test_the_users_variables_stay_as_they_are():
    namespace = {"kept": torch.ones(1), "torch": torch, "np": np}
    names, drawn = dict(namespace), []
    source = GOOD + "kept = 5\ntorch.set_default_dtype(torch.float64)\n"
    for checks in (False, True):
        torch.manual_seed(7)
        np.random.seed(7)
        if checks:
            check(source, "single", names=namespace)
        drawn.append((torch.rand(1), np.random.rand()))
    assert drawn[0] == drawn[1]
    assert torch.get_default_dtype() == torch.float32
    assert namespace == names


SPARSE = MODEL + (
    "def model(): return nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Flatten(),"
    " nn.Linear(12, 3))\n"
    "def data(split): return torch.randint(9, (20, 4)), torch.randint(3, (20,))\n"
)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sparse_gradients_are_refused_where_they_cannot_be_exchanged(strategy):
    if not STRATEGIES[strategy].is_dense:
        check(SPARSE, strategy)
        return
    with fails(f"0.weight .* {strategy}"):
        check(SPARSE, strategy)


TEMPERATURE = GOOD + (
    "class Net(nn.Linear):\n"
    "    def __init__(self):\n"
    "        super().__init__(4, 3)\n"
    "        self.temperature = nn.Parameter(torch.ones(()))\n"
    "    def forward(self, inputs): return super().forward(inputs) * self.temperature.sum()\n"
    "model = Net\n"
)
TWO_TYPES = GOOD + (
    "class Cast(nn.Module):\n"
    "    def forward(self, inputs): return inputs.double()\n"
    "class Whole(nn.Module):\n"
    "    def __init__(self, *steps):\n"
    "        super().__init__()\n"
    "        self.one, self.cast, self.other = steps\n"
    "    def forward(self, inputs): return self.other(self.cast(self.one(inputs)))\n"
    "def model(): return nn.Sequential(nn.Linear(4, 3), Cast(), nn.Linear(3, 3).double())\n"
)


@pytest.mark.parametrize(
    ("strategy", "source", "said"),
    [
        ("ddp:static_graph=on", GOOD, "static_graph"),
        ("ddp:bucket_cap_mb=0", GOOD, "bucket_cap_mb"),
        ("ddp:hook=powersgd", TEMPERATURE, "temperature"),
        ("ddp:hook=powersgd", TWO_TYPES, "powersgd"),
        ("zero", TWO_TYPES, "zero"),
        ("fsdp", TWO_TYPES.replace("nn.Sequential", "Whole"), "fsdp"),
        ("fsdp", TEMPERATURE, r"temperature, of shape \(\)"),
        ("fsdp", TEMPERATURE.replace("ones(())", "ones(0)"), r"temperature, of shape \(0,\)"),
    ],
)
def test_what_one_strategy_cannot_train_is_refused_before_anything_trains(strategy, source, said):
    check(source, "ddp", accumulate=2)
    with fails(said):
        check(source, strategy, accumulate=2)
    check(TWO_TYPES, "fsdp")  # each of its layers is of one type


def test_a_scheduler_and_a_warm_up_exclude_each_other():
    source = GOOD_CELLS["scheduler"]
    for option, changes in (
        ("--lr-warmup", {"num_lr_warmup_epochs": 1}),
        ("--lr-scaling", {"lr_scaling": "sqrt", "batch_per_worker": 5}),
    ):
        with fails(option):
            check(source, "ddp", **changes)


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ("def optimiser(params): pass", ("optimiser", "optimizer")),
        ("def metrics(o, t): return 1", ("metrics", "metric")),
        ("def metrics(o, t): return 1\ndef metric(o, t): return metrics(o, t)", ()),
        ("def optimiser(params): pass\noptimizer = None\nkept = optimiser", ()),
        ("def noise(): return 1", ()),
    ],
)
def test_a_misspelt_function_is_told(more, names):
    notes = cell_task(GOOD + more, {}, "cell").notes
    assert len(notes) == bool(names)
    assert all(name in note for note in notes for name in names)


@pytest.mark.filterwarnings("error")
def test_a_number_may_be_a_tensor_of_the_graph():
    assert number_of(torch.ones(1, requires_grad=True) * 2, "training_step()") == 2.0


def test_a_cell_runs_once_for_all_runs_of_a_comparison():
    source = GOOD + "calls.append(1)\n"
    calls: list[int] = []
    for comparison, strategy in (("a", "ddp"), ("a", "async"), ("b", "ddp"), ("", "ddp")):
        check(source, strategy, names={"calls": calls}, comparison=comparison)
    forget()
    assert len(calls) == 3


def test_of_a_loader_with_a_subset_only_the_subset_is_taken():
    source = MODEL + "from torch.utils.data import *\nsamples = [(i, i) for i in range(20)]\n"
    source += "def data(split): return DataLoader(samples, 4, sampler=SubsetRandomSampler([3, 5]))"
    train = cell_task(source, {}, "cell").train
    assert train.fetch(torch.arange(len(train)))[0].tolist() == [3, 5]
