"""ddpnb reports every mistake in a comparison cell in one sentence, before anything trains."""

from cProfile import Profile
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.rank import random_state
from ddpnb.rank.tasks import forget
from ddpnb.rank.tasks.cell import cell_task
from ddpnb.rank.training import validation
from ddpnb.rank.training.run import Surroundings
from tests.cells import DATA, GOOD, MODEL, STEP
from tests.rank.ranks import make_state

NO_NAMES = MappingProxyType({})


def check(
    source: str, strategy: str = "ddp", num_ranks: int = 2, names=NO_NAMES, rank=0, **choices
):
    spec = RunSpec(run_id="r", strategy=strategy, source=source, **{"batch_size": 10} | choices)
    here = Surroundings(state=make_state(rank, num_ranks), namespace=names)
    return validation.validate(spec, here)


def fails(match: str):
    return pytest.raises(UserError, match=match)


def of_batch(expression: str) -> str:
    """Return a cell with a step that returns ``expression``. In it ``error`` is the loss."""
    return GOOD + (
        "def training_step(model, batch):\n"
        "    inputs, targets = batch\n"
        "    error = nn.functional.cross_entropy(model(inputs), targets)\n"
        f"    return {expression}\n"
    )


def with_optimizer(result: str) -> str:
    return GOOD + (
        "def optimizer(params):\n"
        "    made = torch.optim.SGD(params, lr=0.1)\n"
        "    rates = torch.optim.lr_scheduler\n"
        f"    return {result}\n"
    )


ITEMS = MODEL + (
    "class Own(torch.utils.data.Dataset):\n"
    "    def __len__(self): return 20\n"
    "    def __getitem__(self, i): return {}\n"
    "def data(split): return Own()\n"
)
LOADER = GOOD + (
    "from torch.utils.data import *\n"
    "samples = TensorDataset(torch.randn(20, 4), torch.zeros(20).long())\n"
    "class Own(SequentialSampler): pass\n"
    "def data(split): return DataLoader(samples, {})\n"
)
GOOD_CELLS = {
    "arrays": MODEL + "import numpy as np\nx = np.ones((20, 4), dtype=np.float32)\n"
    "x.flags.writeable = False\ndef data(split): return x, np.zeros(20, dtype=np.int64)",
    "turned arrays": MODEL + "import numpy as np\n"
    "def data(split): return np.ones((20, 4), '>f4')[::-1], np.arange(40)[::2] % 3",
    "Dataset": ITEMS.format("(torch.randn(4), i % 3)"),
    "list": MODEL + "def data(split): return [(torch.randn(4), i % 3) for i in range(20)]",
    "loader": LOADER.format("7"),
    "dict": of_batch("{'a': 0.5, 'loss': error}"),
    "metric": GOOD + "def metric(outputs, targets): return (outputs.argmax(1) == targets).sum()",
    "validation step": GOOD + STEP + "def validation_step(model, batch): return {'f1': 0.5}",
    "scheduler": with_optimizer("made, rates.StepLR(made, 3)"),
}


@pytest.mark.parametrize("source", GOOD_CELLS.values(), ids=GOOD_CELLS)
@pytest.mark.filterwarnings("error::UserWarning")
def test_anything_that_trains_passes(source):
    assert check(source, accumulate=2).num_samples == 20


BAD_CELLS = {
    "no model": ("import torch\n" + DATA, "model"),
    "model is a module": (GOOD + "model = nn.Linear(4, 3)", "a Linear"),
    "no parameters": (GOOD + "def model(): return nn.ReLU()", "optimizer"),
    "lazy": (GOOD + "def model(): return nn.LazyLinear(3)", "lazy"),
    "wrapped": (GOOD + "def model(): return nn.DataParallel(nn.Linear(4, 3))", "DataParallel"),
    "own sampler": (LOADER.format("sampler=Own([1, 2])"), "custom sampler"),
    "drawn samples": (
        LOADER.format("sampler=RandomSampler(samples, replacement=True)"),
        "custom sampler",
    ),
    "unequal leaves": (
        GOOD + STEP + "def data(split): return {'a': torch.ones(20, 4), 'b': (torch.ones(19),)}",
        r"'b': \(\(19,\),\)",
    ),
    "empty": (GOOD + "def data(split): return torch.ones(20 * (split == 'train'), 4)", "'test'"),
    "items that do not stack": (ITEMS.format("torch.ones(i % 3 + 1), 1"), "collate_fn"),
    "no length": (ITEMS.format("torch.ones(4), 1").replace("def __len__", "def num"), "an Own"),
    "collate_fn of tensors": (GOOD + "def collate_fn(items): return items", "collate_fn"),
    "loss is detached": (of_batch("error.detach()"), "does not require grad"),
    "loss fails": (GOOD + "loss = nn.MSELoss()", r"loss.* \(5, 3\) .*RuntimeError"),
    "model fails": (GOOD + "def model(): return nn.Linear(5, 3)", r"\(5, 4\): RuntimeError"),
    "one column": (GOOD + "def model(): return nn.Linear(4, 1)", r"one column, \(5, 1\)"),
    "step returns nothing": (of_batch("None"), "None"),
    "loss is a sum": (GOOD + "loss = nn.CrossEntropyLoss(reduction='sum')", "loss.* is a sum"),
    "step is a sum": (of_batch("error * len(inputs)"), "training_step.* sum"),
    "no loss": (of_batch("{'f1': error}"), "'loss'"),
    "a text beside it": (of_batch("{'f1': 'good', 'loss': error}"), "'f1'.*a str"),
    "a method that DDP hides": (of_batch("error * model.in_features"), "'in_features'"),
    "the model that DDP wraps": (
        GOOD + STEP.replace("model(inputs)", "getattr(model, 'module', model)(inputs)"),
        "never calls model",
    ),
    "metric returns a vector": (
        GOOD + "def metric(outputs, targets): return {'f1': outputs.mean(dim=1)}",
        r"'f1'.*\(10,\)",
    ),
    "optimizer of something else": (GOOD + "def optimizer(params, rate): pass", "TypeError.*rate"),
    "several optimizers": (with_optimizer("[made, made]"), "a list"),
    "a scheduler that wants a metric": (with_optimizer("made, rates.ReduceLROnPlateau(made)"), "R"),
}


@pytest.mark.parametrize(("source", "said"), BAD_CELLS.values(), ids=BAD_CELLS)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_each_mistake_is_one_sentence(source, said):
    with fails(said) as caught:
        check(source)
    assert "\n" not in str(caught.value)


RESULTS = {
    "np.array(list('abcd'))": "type <U1",
    "np.array([1, None, 'a', 2])": "type object",
    "np.zeros(4, 'M8[D]')": r"datetime64\[D\]",
    "np.zeros(4, [('a', 'f4')])": "'a'",
    "pandas.Series([1.0, 2.0])": r"a Series .* to_numpy\(\)",
    "pandas.DataFrame({'a': [1.0, 2.0]})": r"a DataFrame .* to_numpy\(\)",
    "sparse.csr_matrix(np.eye(4))": r"a csr_matrix .* toarray\(\)",
    "np.ma.masked_array([1.0, 2.0], [0, 1])": r"a MaskedArray .* filled\(\)",
    "torch.eye(4).to_sparse()": r"a Tensor .* to_dense\(\)",
    "torch.nested.nested_tensor([torch.ones(2)])": r"to_padded_tensor\(\)",
}
NESTED = ["{{'x': {}}}", "({}, [1])"]


@pytest.mark.parametrize(
    ("result", "form"),
    [*((result, "{}") for result in RESULTS), *((next(iter(RESULTS)), form) for form in NESTED)],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_data_that_torch_cannot_hold_are_named_with_the_way_out(result, form):
    source = f"{GOOD}\nimport numpy as np, pandas\nfrom scipy import sparse\n"
    with fails(RESULTS[result]):
        check(f"{source}def data(split): return {form.format(result)}")


BATCHNORM = GOOD + "def model(): return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))"


@pytest.mark.parametrize(
    ("strategy", "too_small", "is_enough"),
    [
        ("ddp", {"batch_size": 18}, {}),  # 20 = 18 + 2, so the last shards have 1 sample
        ("single", {"batch_size": 8, "accumulate": 4}, {"accumulate": 5}),  # 20 = 8 + 8 + 4
        ("async", {"accumulate": 5}, {"accumulate": 2}),
    ],
)
def test_the_smallest_batch_of_the_training_is_tried(strategy, too_small, is_enough):
    check(BATCHNORM, strategy, **is_enough)
    with fails("batch of 1 samples"):
        check(BATCHNORM, strategy, **too_small)


def test_names_of_earlier_cells_are_seen_but_not_taken_for_the_cells_own():
    earlier = {"Net": nn.Linear, "torch": torch, "loss": 0.3, "optimizer": 3, "model": nn.ReLU}
    check("def model(): return Net(4, 3)\n" + DATA, names=earlier)
    with fails("model"):
        check("import torch\n" + DATA, names=earlier)


def test_a_model_of_the_notebook_is_refused_unless_it_is_copied():
    net = nn.Linear(4, 3)
    before = net.weight.clone()
    source = GOOD + "def model(): return nn.Sequential(net, nn.Linear(3, 3))\n"
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


def test_a_misspelt_function_is_told():
    (note,) = cell_task(GOOD + "def optimiser(params): pass", {}, "cell").notes
    assert "optimiser" in note


def test_a_cell_runs_once_for_all_runs_of_a_comparison():
    source = GOOD + "calls.append(1)\n"
    calls: list[int] = []
    for comparison, strategy in (("a", "ddp"), ("a", "async"), ("b", "ddp"), ("", "ddp")):
        check(source, strategy, names={"calls": calls}, comparison_id=comparison)
    forget()
    assert len(calls) == 3


@pytest.mark.parametrize("strategy", ["dp", "async"])
def test_only_ranks_that_train_measure_their_speed_and_only_for_measured_runs(strategy):
    for rank in range(3):
        trains = strategy in ("ddp", "async") or rank == 0
        checked = check(GOOD, strategy, 3, rank=rank, min_seconds=1.0)
        assert (checked.seconds_per_trained > 0) == (checked.num_epochs > 0) == trains
        emulated = check(GOOD, strategy, 3, rank=rank, devices="3", compute="1ms/sample,2ms")
        assert emulated.seconds_per_trained == emulated.seconds_per_judged == 0


def test_a_profiler_that_the_user_has_started_goes_on(monkeypatch):
    monkeypatch.setattr(random_state, "_at_start", [])
    random_state.note_start()  # as on a rank
    with Profile() as profiler:
        check(GOOD)
        torch.manual_seed(0)
    assert any("manual_seed" in str(each.code) for each in profiler.getstats())
