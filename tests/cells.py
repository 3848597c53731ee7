"""Comparison cells for tests, and parts of such cells."""

MODEL = "import torch\nfrom torch import nn\ndef model(): return nn.Linear(4, 3)\n"
DATA = "def data(split): return torch.randn(20, 4), torch.randint(3, (20,))\n"
GOOD = MODEL + DATA

NET = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
"""
ROWS = """
def data(split):
    x = torch.randn(200 if split == "train" else 50, 4)
    return x, (x.sum(dim=1) > 0).long()
"""
CELL = NET + ROWS
WITH_DROPOUT = CELL.replace("nn.ReLU(), ", "nn.ReLU(), nn.Dropout(0.1), ")

STEP = """
def training_step(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)
"""
ON_A_DICT = (
    NET
    + ROWS.replace("return x, (x", 'return {"x": (x[:, :2], x[:, 2:]), "y": (x').replace(
        "long()", "long()}"
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

def model():
    return nn.EmbeddingBag(20, 2)

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
"""The items differ in length, so only the cell's ``collate_fn`` can collate them."""

DATASET = f"""{NET}
class Own(torch.utils.data.Dataset):
    def __init__(self, num): self.inputs = torch.randn(num, 4)
    def __len__(self): return len(self.inputs)
    def __getitem__(self, i): return self.inputs[i], int(self.inputs[i].sum() > 0)

def data(split):
    return Own(100 if split == "train" else 20)
"""
CLOSURE = f"""{CELL}
from threading import Lock

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.lock = nn.Linear(4, 16), nn.Linear(16, 2), Lock()
        self.run = lambda inputs: self.last(torch.relu(self.first(inputs)))
    def forward(self, inputs):
        return self.run(inputs)
model = Block
"""
"""The module has a lock, and a function that refers to the module itself."""

TUPLES = (
    CELL.replace("long()", "float()")
    + """
class Both(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs), inputs.sum()
def model(): return Both(4, 1)

def loss(outputs, targets):
    return nn.functional.binary_cross_entropy_with_logits(outputs[0][:, 0], targets)
def metric(outputs, targets):
    return {"f1": torch.tensor(0.25), "size": len(outputs[0]) + len(targets)}
"""
)
MIXTURE = f"""{CELL}
class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 2) for _ in range(3)])
    def forward(self, inputs):
        outputs = inputs.new_zeros(len(inputs), 2)
        for number in (0, 1):  # the third expert is never used, and the first seldom
            rows = (inputs[:, 0] < 1) == number
            if rows.any(): outputs[rows] = self.experts[number](inputs[rows])
        return outputs
model = Mixture
"""

SPARSE = f"""{CELL}
def model():
    return nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(16, 2))
def data(split):
    words = torch.randint(20, (100, 2))
    return words, (words.sum(dim=1) > 19).long()
"""
IN_GROUPS = (
    CELL
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
OWN_SGD = "\ndef optimizer(params): return torch.optim.SGD(params, lr=0.05, momentum={momentum})\n"
HALVING = """
def optimizer(params):
    made = torch.optim.SGD(params, lr=0.8)
    return made, torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
"""
GAN = """
import torch
from torch import nn

def model():
    return nn.ModuleDict({"make": nn.Linear(2, 4), "judge": nn.Linear(4, 1)})

def data(split):
    return torch.randn(60 if split == "train" else 20, 4)

class Gan:
    def setup(self, worker):
        self.model = worker.model
        self.optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in
                           (self.model["make"], self.model["judge"])]

    def step(self, batch):
        judge, made = self.model["judge"], self.model["make"](torch.randn(len(batch.tree), 2))
        softplus = nn.functional.softplus
        self.update(1, (softplus(judge(made.detach())) + softplus(-judge(batch.tree))).mean())
        loss = softplus(-judge(made)).mean()
        self.update(0, loss)
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
MEETS = (
    CELL
    + """
class Meets:
    def setup(self, worker):
        self.worker = worker
        (worker.folder / f"{worker.name}-{worker.rank}").touch()
        torch.distributed.barrier()
        assert (worker.folder / f"{worker.name}-{1 - worker.rank}").exists()

    def step(self, batch):
        weights = torch.tensor([batch.weight, batch.num_samples], dtype=torch.double)
        assert 0 < batch.weight < 1
        torch.distributed.all_reduce(weights)
        assert weights.tolist() == [1, batch.num_global], weights
        return self.worker.compute_gradients(batch)

    def finish(self): pass
"""
)
"""Asserts that the ranks share a folder, and that their batches add up to a global batch."""

HEAVY = CELL.replace("16), nn.ReLU(),", "256), *[nn.Linear(256, 256), nn.Tanh()] * 100,").replace(
    "Linear(16", "Linear(256"
)
"""Computation takes far longer than the rest of a step."""

COMPARED = """%%ddp_compare ddp --epochs 1 --batch-size 32 --name lines
import torch
from torch import nn

def model():
    return nn.Linear(4, 2)

def data(split):
    generator = torch.Generator().manual_seed(len(split))
    inputs = torch.randn(96, 4, generator=generator)
    return inputs, (inputs.sum(1) > 0).long()
"""
"""A cell as you type it in a notebook. Tests replace parts of this cell."""
