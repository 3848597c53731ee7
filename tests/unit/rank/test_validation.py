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
from ddpnb.rank.tasks import cell_task
from ddpnb.rank.training import loop
from ddpnb.rank.training.evaluation import number_of
from tests.rank.ranks import make_state

MODEL = "from torch import nn\nimport torch\ndef model(): return nn.Linear(4, 3)\n"
DATA = "def data(split): return torch.randn(20, 4), torch.randint(3, (20,))\n"
DATA_ALONE = "import torch\n" + DATA
GOOD = MODEL + DATA


NO_NAMES = MappingProxyType({})


def check(source: str, strategy: str = "ddp", num_ranks: int = 2, batch_size: int = 10, **names):
    check_choices(source, strategy, num_ranks, names, batch_size=batch_size)


def check_choices(source: str, strategy: str, num_ranks: int = 2, names=NO_NAMES, **choices):
    """Check what is trained with further options."""
    spec = RunSpec(run_id="r", strategy=strategy, source=source, **{"batch_size": 10} | choices)
    loop.validate(spec, state=make_state(0, num_ranks), namespace=names)


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "async"])
def test_a_good_cell_passes(strategy):
    check(GOOD, strategy)


@pytest.mark.parametrize("task", ["digits", "synthetic"])
def test_built_in_tasks_pass(task):
    spec = RunSpec(run_id="r", strategy="ddp", task=task)
    loop.validate(spec, state=make_state(0, 2), namespace={})


GOOD_DATA = {
    "arrays": "import numpy as np\n"
    "def data(split): return np.ones((20, 4), dtype=np.float32), np.zeros(20, dtype=np.int64)",
    "read-only arrays": "import numpy as np\n"
    "x = np.ones((20, 4), dtype=np.float32)\nx.flags.writeable = False\n"
    "def data(split): return x, np.zeros(20, dtype=np.int64)",
    "TensorDataset": "from torch.utils.data import TensorDataset\n"
    "def data(split): return TensorDataset(torch.randn(20, 4), torch.zeros(20).long())",
    "Dataset": "from torch.utils.data import Dataset\n"
    "class Own(Dataset):\n"
    "    def __len__(self): return 20\n"
    "    def __getitem__(self, i): return torch.randn(4), i % 3\n"
    "def data(split): return Own()",
}


@pytest.mark.parametrize("source", GOOD_DATA.values(), ids=GOOD_DATA)
@pytest.mark.filterwarnings("error")
def test_all_kinds_of_data_pass(source):
    check(MODEL + source)


BAD_CELLS = {
    "no model": (DATA, "defines no model()"),
    "no data": (MODEL, "defines no data()"),
    "model is no function": ("model = 3\n" + DATA, "model in the cell is not a function"),
    "model returns nothing": (GOOD + "def model(): pass", "returned None; return a torch"),
    "no parameters": (GOOD + "def model(): return nn.ReLU()", "without trainable parameters"),
    "all frozen": (
        GOOD + "def model(): return nn.Linear(4, 3).requires_grad_(False)",
        "without trainable parameters",
    ),
    "lazy": (GOOD + "def model(): return nn.LazyLinear(3)", "lazy layers; give their sizes"),
    "wrapped": (
        GOOD + "def model(): return nn.DataParallel(nn.Linear(4, 3))",
        "wrapped in DataParallel; return the plain model, the strategy wraps it",
    ),
    "wrapped inside": (
        GOOD + "def model(): return nn.Sequential(nn.DataParallel(nn.Linear(4, 3)))",
        "wrapped in DataParallel",
    ),
    "unused parameter": (
        GOOD + "class M(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 3)\n"
        "        self.spare = nn.Parameter(torch.ones(1))\n"
        "def model(): return M()",
        "parameter spare has no part in the loss",
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
        r"not the model's, but of the Block that run holds: .*requires_grad_\(False\)",
    ),
    "loss of another module": (
        GOOD + "head = nn.Linear(3, 3)\n"
        "def loss(outputs, targets): return nn.functional.cross_entropy(head(outputs), targets)",
        r"not the model's, but of the Linear that loss holds",
    ),
    "batches of ones own": (
        GOOD + "from torch.utils.data import *\n"
        "def data(split): return DataLoader(TensorDataset(torch.randn(20, 4), "
        "torch.zeros(20).long()), batch_sampler=[[0, 1], [2]])",
        "with the batch_sampler list, and its choice of batches would be lost",
    ),
    "a sampler of ones own": (
        GOOD + "from torch.utils.data import *\n"
        "class Own(SequentialSampler): pass\n"
        "def data(split):\n"
        "    samples = TensorDataset(torch.randn(20, 4), torch.zeros(20).long())\n"
        "    return DataLoader(samples, sampler=Own(samples))",
        "with the sampler Own, and its choice of samples would be lost",
    ),
    "held-out samples that are drawn": (
        GOOD + "from torch.utils.data import *\n"
        "def data(split):\n"
        "    samples = TensorDataset(torch.randn(20, 4), torch.zeros(20).long())\n"
        "    return DataLoader(samples, sampler=RandomSampler(samples, replacement=True))",
        r"data\('test'\) returned a DataLoader with the sampler RandomSampler",
    ),
    "data is a text": (GOOD + "def data(split): return 'abc'", "returned a str; return tensors"),
    "data is None": (GOOD + "def data(split): pass", "returned None"),
    "three tensors": (
        GOOD + "def data(split): return (torch.ones(20),) * 3",
        r"gives batches that are a tuple of 3, not \(inputs, targets\): define training_step",
    ),
    "strings": (GOOD + "def data(split): return ['a'], ['b']", "a tuple with a list in it"),
    "unequal": (
        GOOD + "def data(split): return torch.ones(20, 4), torch.ones(19)",
        "20 inputs but 19 targets",
    ),
    "empty": (
        GOOD + "def data(split): return torch.ones(0, 4), torch.ones(0)",
        r"data\('train'\) returned no samples",
    ),
    "empty test split": (
        GOOD + "def data(split):\n"
        "    n = 20 if split == 'train' else 0\n"
        "    return torch.ones(n, 4), torch.ones(n).long()",
        r"data\('test'\) returned no samples",
    ),
    "wrong items": (
        GOOD + "from torch.utils.data import TensorDataset\n"
        "def data(split): return TensorDataset(torch.ones(20, 4))",
        "gives batches that are a tuple of 1, not",
    ),
    "items that do not stack": (
        GOOD + "from torch.utils.data import Dataset\n"
        "class Own(Dataset):\n"
        "    def __len__(self): return 20\n"
        "    def __getitem__(self, i): return object(), 1\n"
        "def data(split): return Own()",
        r"data\(split\) cannot be stacked into a batch \(TypeError.*define collate_fn\(items\)",
    ),
    "items of strings": (
        GOOD + "from torch.utils.data import Dataset\n"
        "class Own(Dataset):\n"
        "    def __len__(self): return 20\n"
        "    def __getitem__(self, i): return 'a', 'b'\n"
        "def data(split): return Own()",
        r"gives items without a number or tensor in them",
    ),
    "model takes an argument": (
        GOOD.replace("def model()", "def model(size)"),
        r"model\(size\) in the cell is called as model\(\)\.",
    ),
    "data takes none": (
        GOOD.replace("def data(split)", "def data()").replace("split", "'train'"),
        r"data\(\) in the cell is called as data\(split\)\.",
    ),
    "loss is no function": (GOOD + "loss = 0.3", "loss in the cell is a float, not a function"),
    "loss is a vector": (
        GOOD + "loss = nn.CrossEntropyLoss(reduction='none')",
        r"returned \(5,\); return the mean over the samples",
    ),
    "loss is a sum": (
        GOOD + "loss = nn.CrossEntropyLoss(reduction='sum')",
        "is a sum over the samples; return their mean",
    ),
    "loss is detached": (
        GOOD + "def loss(o, t): return nn.functional.cross_entropy(o, t).detach()",
        "does not depend on the model's parameters",
    ),
    "loss fails": (
        GOOD + "loss = nn.MSELoss()",
        r"loss\(outputs, targets\) failed for outputs of shape \(5, 3\) .*: RuntimeError",
    ),
    "model fails": (
        GOOD + "def model(): return nn.Linear(5, 3)",
        r"failed on a batch of 5 samples, .*\(5, 4\): RuntimeError: .*mat1 and mat2",
    ),
    "model returns a tuple": (
        GOOD + "def model(): return nn.LSTM(4, 3)",
        r"returned \[\(5, 3\), .*\] for 5 samples; return one tensor .*, or define loss",
    ),
    "one column": (
        GOOD + "def model(): return nn.Linear(4, 1)\n"
        "def data(split): return torch.randn(20, 4), torch.zeros(20).long()",
        r"one column, \(5, 1\), and the default loss, .*: define loss\(outputs, targets\)\.",
    ),
    "no column": (
        GOOD + "def model(): return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))\n"
        "def data(split): return torch.randn(20, 4), torch.rand(20)",
        r"returned one column, \(5,\), and the default loss",
    ),
    "test samples of another size": (
        GOOD + "def data(split):\n"
        "    return torch.randn(20, 4 if split == 'train' else 5), torch.randint(3, (20,))",
        r"cannot be evaluated on data\('test'\): RuntimeError: .*mat1 and mat2",
    ),
    "fails in evaluation mode": (
        GOOD + "class M(nn.Linear):\n"
        "    def forward(self, inputs):\n"
        "        return super().forward(inputs) if self.training else None\n"
        "def model(): return M(4, 3)",
        r"cannot be evaluated on data\('train'\): TypeError",
    ),
    "optimizer is no function": (GOOD + "optimizer = 3", "optimizer in the cell is an int, not a"),
    "optimizer returns nothing": (
        GOOD + "def optimizer(params): pass",
        r"optimizer\(params\) returned None; return a torch.optim.Optimizer",
    ),
    "optimizer needs a closure": (
        GOOD + "optimizer = torch.optim.LBFGS",
        r"optimizer.step\(\) failed: TypeError",
    ),
}


@pytest.mark.parametrize(("source", "sentence"), BAD_CELLS.values(), ids=BAD_CELLS)
def test_each_mistake_is_one_sentence(source, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
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
    with pytest.raises(UserError, match="is a sum over the samples"):
        check(NOISY.format(noise=noise, kind="sum"), batch_size=20)


def test_a_loss_of_rounding_alone_is_no_sum():
    check(GOOD + "def loss(outputs, targets): return (outputs * 1e-9).square().sum()")


CONTRASTIVE = (
    "def loss(outputs, targets):\n"
    "    scores = outputs @ (outputs.detach() + {noise} * torch.randn_like(outputs)).T\n"
    "    return nn.functional.cross_entropy(scores, torch.arange(len(outputs)))\n"
)
DEPENDENT = {
    "contrastive": CONTRASTIVE.format(noise=0),
    "contrastive, with noise": CONTRASTIVE.format(noise=0.1),
    "variance": "def loss(outputs, targets): return outputs.var()",
}
INDEPENDENT = {
    "default": "",
    "with noise": "def loss(outputs, targets):\n"
    "    return (outputs + 0.3 * torch.randn_like(outputs)).square().mean()",
    "odd number": "def data(split): return torch.randn(18, 4), torch.randint(3, (18,))",
    "BatchNorm and dropout": "def model():\n"
    "    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout())",
}


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "async"])
def test_a_note_says_that_a_loss_depends_on_the_batch(strategy):
    def notes_of(source):
        spec = RunSpec(run_id="r", strategy=strategy, source=GOOD + source, batch_size=10)
        return loop.validate(spec, state=make_state(0, 2), namespace={}).notes

    num_expected = 0 if strategy == "single" else 1
    assert [len(notes_of(each)) for each in DEPENDENT.values()] == [num_expected] * 3
    assert [notes_of(each) for each in INDEPENDENT.values()] == [()] * 4


def test_an_infinite_loss_is_not_taken_for_a_sum():
    check(GOOD + "loss = lambda outputs, targets: outputs.square().mean() * 1e39")


def test_batches_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="batch of 2 cannot be shared by 3 ranks"):
        check(GOOD, "single", num_ranks=3, batch_size=2)
    with pytest.raises(UserError, match=r"larger than the training split \(20 samples\)"):
        check(GOOD, batch_size=21)


BATCHNORM = GOOD + "def model(): return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))"


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "choices"),
    [
        ("ddp", 2, {"batch_size": 18}),  # 20 = 18 + 2: one sample each in the last step
        ("single", 2, {"batch_size": 8, "accumulate": 4}),  # 20 = 8 + 8 + 4
        ("ddp", 2, {"batch_size": 10, "accumulate": 4}),
        ("dp", 2, {"batch_size": 10, "accumulate": 4}),
        ("dp", 4, {"batch_size": 10}),  # DataParallel cuts 10 into 3, 3, 3 and 1
        ("dp", 4, {"batch_size": 10, "num_epochs": 0.5}),
        ("dp", 4, {"batch_size": 20, "accumulate": 3}),  # 7, 7, 6, and 7 into 2, 2, 2 and 1
    ],
)
def test_the_smallest_batch_of_the_training_is_tried(strategy, num_ranks, choices):
    sentence = r"on a batch of 1 samples.*more than 1 value per channel"
    with pytest.raises(UserError, match=sentence):
        check_choices(BATCHNORM, strategy, num_ranks, **choices)


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "choices"),
    [
        ("single", 2, {"accumulate": 5}),
        ("ddp", 2, {"accumulate": 2}),
        ("dp", 2, {"accumulate": 2}),
        ("dp", 2, {"batch_size": 20, "accumulate": 3}),  # 7, 7, 6, and 7 into 4 and 3
        ("ddp", 4, {}),
        ("async", 2, {"accumulate": 2}),
    ],
)
def test_two_samples_are_enough(strategy, num_ranks, choices):
    check_choices(BATCHNORM, strategy, num_ranks, **choices)


def test_what_the_cell_itself_raises_comes_with_the_cells_lines():
    with pytest.raises(ZeroDivisionError) as caught:
        check(GOOD + "def data(split):\n    return 1 / 0  # here\n")
    assert "return 1 / 0  # here" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(SyntaxError):
        check("def model(:")


def test_names_of_earlier_cells_are_seen_but_not_taken_for_the_cells_own():
    check(
        "def model(): return Net(4, 3)\n" + DATA,
        Net=nn.Linear,
        torch=torch,
        loss=0.3,
        optimizer=torch.optim.SGD([torch.ones(1)], lr=1),
    )
    with pytest.raises(UserError, match="defines no model"):
        check("import torch\n" + DATA, model=nn.Linear(4, 3))


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "async"])
@pytest.mark.parametrize("model", ["net", "nn.Sequential(net, nn.Linear(3, 3))"])
def test_a_model_of_the_notebook_is_refused_unless_it_is_copied(strategy, model):
    net = nn.Linear(4, 3)
    before = net.weight.clone()
    source = MODEL + DATA + f"def model(): return {model}\n"
    with pytest.raises(UserError, match=r"returned before.*copy\.deepcopy"):
        check(source, strategy, net=net)
    check("import copy\n" + source.replace("net", "copy.deepcopy(net)"), strategy, net=net)
    assert torch.equal(net.weight, before)
    assert net.weight.grad is None


def test_the_users_variables_stay_as_they_are():
    net, kept = nn.Linear(4, 3), torch.ones(1)
    namespace = {"net": net, "kept": kept, "torch": torch, "np": np}
    before, names = net.weight.clone(), dict(namespace)
    source = "import copy\ndef model(): return copy.deepcopy(net)\nkept = 5\n" + DATA.replace(
        "4),", "4).float(),"
    )
    torch.manual_seed(7)
    np.random.seed(7)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(7)
    np.random.seed(7)
    source += "torch.set_default_dtype(torch.float64)\n"
    check_choices(source, "single", names=namespace)
    assert (torch.rand(1), np.random.rand()) == expected
    assert torch.get_default_dtype() == torch.float32
    assert namespace == names
    assert torch.equal(net.weight, before)


SPARSE = (
    "import torch\nfrom torch import nn\n"
    "def model(): return nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Flatten(),"
    " nn.Linear(12, 3))\n"
    "def data(split): return torch.randint(9, (20, 4)), torch.randint(3, (20,))\n"
)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sparse_gradients_are_refused_where_they_cannot_be_exchanged(strategy):
    if not STRATEGIES[strategy].is_dense:
        return check(SPARSE, strategy)
    with pytest.raises(UserError, match=f"of 0.weight is sparse, and {strategy} exchanges"):
        check(SPARSE, strategy)


TEMPERATURE = (
    MODEL.partition("def")[0]
    + DATA
    + (
        "class Net(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 3)\n"
        "        self.temperature = nn.Parameter(torch.ones(()))\n"
        "    def forward(self, inputs): return super().forward(inputs) * self.temperature.sum()\n"
        "def model(): return Net()\n"
    )
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
    ("strategy", "source", "sentence"),
    [
        ("ddp:static_graph=on", GOOD, "static_graph=on cannot accumulate gradients"),
        ("ddp:bucket_cap_mb=0", GOOD, "bucket_cap_mb must be greater than 0"),
        ("ddp:hook=powersgd", TEMPERATURE, r"temperature, of shape \(\), has no rows"),
        ("ddp:hook=powersgd", TWO_TYPES, "one bucket on CPUs.*one type"),
        ("zero", TWO_TYPES, "zero wants all parameters in one floating-point type"),
    ],
)
def test_what_one_strategy_cannot_train_is_refused_before_anything_trains(
    strategy, source, sentence
):
    check_choices(source, "ddp", accumulate=2)
    with pytest.raises(UserError, match=sentence):
        check_choices(source, strategy, accumulate=2)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (TWO_TYPES.replace("nn.Sequential", "Whole"), "in what it gathers at once"),
        (TEMPERATURE, r"rows, and temperature, of shape \(\), has none: give it"),
        (TEMPERATURE.replace("ones(())", "ones(0)"), r"of shape \(0,\), has none"),
    ],
)
def test_what_fsdp_cannot_shard_is_refused_before_anything_trains(source, sentence):
    check_choices(source, "ddp", accumulate=2)
    check_choices(TWO_TYPES, "fsdp")  # each of its layers is of one type
    with pytest.raises(UserError, match=sentence):
        check_choices(source, "fsdp", accumulate=2)


STEP = GOOD + (
    "def training_step(model, batch):\n"
    "    inputs, targets = batch\n"
    "    return nn.functional.cross_entropy(model(inputs), targets)\n"
)
ANYTHING = {
    "a step": STEP,
    "a dict": STEP.replace("return nn.f", "return {'right': 0.5, 'loss': nn.f").replace(
        "targets)\n", "targets)}\n"
    ),
    "one tensor": STEP.replace(
        "inputs, targets = batch", "inputs, targets = batch, batch[:, 0] > 0"
    )
    .replace("), targets)", "), targets.long())")
    .replace("return torch.randn(20, 4), torch.randint(3, (20,))", "return torch.randn(20, 4)"),
    "a list of items": GOOD
    + "def data(split): return [(torch.randn(4), i % 3) for i in range(20)]",
    "duck typing": GOOD + "class Own:\n"
    "    def __len__(self): return 20\n"
    "    def __getitem__(self, i): return torch.randn(4), i % 3\n"
    "def data(split): return Own()",
    "a loader": GOOD + "from torch.utils.data import DataLoader\n"
    "def data(split): return DataLoader([(torch.randn(4), i % 3) for i in range(20)], 7)",
    "a gradient penalty": STEP.replace(
        "    return ",
        "    inputs = inputs.clone().requires_grad_()\n"
        "    slope, = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)\n"
        "    return slope.square().mean() + ",
    ),
    "outputs with attributes": STEP.replace(
        "    return nn.functional.cross_entropy(model(inputs), targets)",
        "    from collections import OrderedDict\n"
        "    class Outputs(OrderedDict): pass  # as those of transformers\n"
        "    logits = model(inputs)\n"
        "    return Outputs(loss=nn.functional.cross_entropy(logits, targets), logits=logits)",
    ),
    "a metric": GOOD + "def metric(outputs, targets): return (outputs.argmax(1) == targets).sum()",
    "a validation step": STEP + "def validation_step(model, batch): return {'f1': 0.5}",
}


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
@pytest.mark.parametrize("source", ANYTHING.values(), ids=ANYTHING)
def test_anything_that_trains_passes(source, strategy):
    check_choices(source, strategy, accumulate=2)


BAD_STEPS = {
    "None": (STEP.replace("return nn.f", "nn.f"), r"training_step\(model, batch\) returned None"),
    "a vector": (
        STEP.replace("targets)\n", "targets, reduction='none')\n"),
        r"training_step\(model, batch\) returned \(5,\); return the mean",
    ),
    "a sum": (
        STEP.replace("targets)\n", "targets, reduction='sum')\n"),
        r"training_step\(model, batch\) is a sum over the samples; return their mean",
    ),
    "no loss": (
        STEP.replace("return nn.f", "return {'f1': nn.f").replace("targets)\n", "targets)}\n"),
        "returned a dict of 'f1'; give it the mean loss as 'loss'",
    ),
    "a text beside it": (
        STEP.replace("return nn.f", "return {'f1': 'good', 'loss': nn.f").replace(
            "targets)\n", "targets)}\n"
        ),
        r"training_step\(model, batch\)'s 'f1' returned a str; return a number",
    ),
    "an error": (
        STEP.replace("inputs, targets = batch", "inputs = batch['x']"),
        r"training_step\(model, batch\) failed on a batch of 5 samples, .*\(5, 4\).*: TypeError",
    ),
    "a method that DDP hides": (
        STEP.replace("model(inputs)", "model(inputs[:, :model.in_features])"),
        r"AttributeError: DistributedDataParallel hides 'in_features' .* getattr\(model, 'module'",
    ),
    "the model that DDP wraps": (
        STEP.replace("model(inputs)", "getattr(model, 'module', model)(inputs)"),
        r"training_step\(model, batch\) never calls model\(\.\.\.\).*: call model itself",
    ),
    "leaves of other lengths": (
        STEP + "def data(split): return {'a': torch.ones(20, 4), 'b': (torch.ones(19),)}",
        r"returned 20 rows in \['a'\] but 19 in \['b'\]\[0\]; return one row for each sample",
    ),
    "no length": (
        GOOD + "class Own:\n    def __getitem__(self, i): return torch.ones(4), 1\n"
        "def data(split): return Own()",
        "returned an Own without a length; give it a __len__",
    ),
    "a stream": (
        GOOD + "from torch.utils.data import IterableDataset\n"
        "class Own(IterableDataset):\n    def __iter__(self): return iter([])\n"
        "def data(split): return Own()",
        "returned an Own, whose samples have no numbers, .*; return a map-style Dataset, or a list",
    ),
    "ragged items": (
        GOOD + "def data(split): return [(torch.ones(n % 3 + 1), 1) for n in range(20)]",
        r"cannot be stacked into a batch \(RuntimeError.*define collate_fn\(items\)",
    ),
    "a dict without a step": (
        GOOD + "def data(split): return {'x': torch.ones(20, 4)}",
        r"batches that are a dict, not \(inputs, targets\): define training_step\(model, batch\)",
    ),
    "a metric that raises": (
        GOOD + "def metric(outputs, targets): return 1 / 0",
        r"cannot be evaluated on data\('test'\): ZeroDivisionError",
    ),
    "a metric that returns text": (
        GOOD + "def metric(outputs, targets): return 'good'",
        r"metric\(outputs, targets\) returned a str; return a number, or a dict of numbers",
    ),
    "a metric that returns the loss": (
        GOOD + "def metric(outputs, targets): return {'f1': 1.0, 'loss': 2.0}",
        r"metric\(outputs, targets\) returned 'loss', .* or return it from validation_step",
    ),
    "a metric that returns a vector": (
        GOOD + "def metric(outputs, targets): return {'f1': outputs.mean(dim=1)}",
        r"metric\(outputs, targets\)'s 'f1' returned \(10,\); return a number",
    ),
    "a validation step that returns None": (
        GOOD + "def validation_step(model, batch): pass",
        r"validation_step\(model, batch\) returned None; return a number, or a dict of numbers",
    ),
    "metric of a dict": (
        STEP.replace("inputs, targets = batch", "inputs, targets = batch['x'], batch['y']")
        + "def data(split): return {'x': torch.ones(20, 4), 'y': torch.ones(20).long()}\n"
        "def metric(outputs, targets): return 1",
        r"batches that are a dict: .*validation_step",
    ),
    "a scheduler that wants a metric": (
        GOOD + "def optimizer(params):\n    made = torch.optim.SGD(params, lr=0.1)\n"
        "    return made, torch.optim.lr_scheduler.ReduceLROnPlateau(made)",
        r"optimizer\(params\) returned a ReduceLROnPlateau, which wants a metric",
    ),
    "a scheduler that is too short": (
        GOOD + "def optimizer(model):\n    made = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    return made, torch.optim.lr_scheduler.OneCycleLR(made, 0.1, total_steps=2)",
        r"The scheduler cannot make the 4 steps of this run \(ValueError: .*num_steps",
    ),
    "no scheduler": (
        GOOD + "def optimizer(params): return torch.optim.SGD(params, lr=0.1), 'cosine'",
        r"optimizer\(params\) returned a str as the scheduler; return one of",
    ),
    "several optimizers": (
        GOOD + "def optimizer(params): return [torch.optim.SGD(params, lr=0.1)] * 3",
        r"returned 3 optimizers; several of them are a class of your own",
    ),
    "an optimizer of something else": (
        GOOD + "def optimizer(params, rate): return torch.optim.SGD(params, lr=rate)",
        r"optimizer\(params, rate\) in the cell is called as optimizer\(params\)\.",
    ),
    "collate_fn of tensors": (
        GOOD + "def collate_fn(items): return items",
        "returned a tuple, whose rows are stacked already: leave collate_fn out",
    ),
}


@pytest.mark.parametrize(("source", "sentence"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_each_mistake_in_a_general_cell_is_one_sentence(source, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        check(source)
    assert "\n" not in str(caught.value)


def test_a_scheduler_and_a_warm_up_exclude_each_other():
    source = GOOD + (
        "def optimizer(params):\n    made = torch.optim.SGD(params, lr=0.1)\n"
        "    return made, torch.optim.lr_scheduler.StepLR(made, 3)"
    )
    check(source)
    for changes in ({"num_lr_warmup_epochs": 1}, {"lr_scaling": "sqrt", "batch_per_worker": 5}):
        with pytest.raises(UserError, match=r"sets the learning rate: leave --lr-[a-z]+ out"):
            check_choices(source, "ddp", **changes)


def test_what_an_earlier_cell_has_bound_too_counts_where_the_cell_binds_it():
    def make() -> nn.Module:
        return nn.Linear(4, 3)

    check(DATA_ALONE + "model = make\n", make=make, model=make)
    with pytest.raises(UserError, match="defines no model"):
        check(DATA_ALONE, model=make)


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ("def optimiser(params): pass", "The cell's optimiser() is used by nothing; did you mean "),
        ("def metrics(o, t): return 1", "The cell's metrics() is used by nothing; did you mean "),
        ("def metrics(o, t): return 1\ndef metric(o, t): return metrics(o, t)", ""),
        ("def optimiser(params): pass\noptimizer = None\nkept = optimiser", ""),
        ("def noise(): return 1", ""),
    ],
)
def test_a_misspelt_function_is_told(more, note):
    spec = RunSpec(run_id="r", strategy="ddp", source=GOOD + more)
    notes = cell_task(spec, {}, "cell").notes
    assert [each.startswith(note) for each in notes] == [True] * bool(note), notes


@pytest.mark.filterwarnings("error")
def test_a_number_may_be_a_tensor_of_the_graph():
    assert number_of(torch.ones(1, requires_grad=True) * 2, "training_step()") == 2.0
