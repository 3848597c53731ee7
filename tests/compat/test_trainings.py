"""Trainings in the style of PyTorch's tutorials and examples, compared as they are."""

import pytest

from tests.compat.conftest import Run

GPT = """%%ddp_compare dp ddp async fsdp --epochs 1 --batch-size 16
import math
import torch
from torch import nn
from torch.nn import functional as F

text = "the quick brown fox jumps over the lazy dog. " * 40
letters = sorted(set(text))
ids = torch.tensor([letters.index(letter) for letter in text])
BLOCK = 16

class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        q, k, v = (
            part.view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        wide = 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

class GPT(nn.Module):
    def __init__(self, width=16, heads=2, depth=1):
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(letters), width), nn.Embedding(BLOCK, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(letters), bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, x, y=None):
        places = torch.arange(x.shape[1], device=x.device)
        logits = self.head(self.norm(self.blocks(self.tokens(x) + self.places(places))))
        if y is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())

class Letters(torch.utils.data.Dataset):
    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return (len(self.ids) - 1) // BLOCK

    def __getitem__(self, index):
        cut = self.ids[index * BLOCK : (index + 1) * BLOCK + 1]
        return cut[:-1], cut[1:]

def model():
    return GPT()

def data(split):
    cut = int(0.9 * len(ids))
    return Letters(ids[:cut] if split == "train" else ids[cut:])

def training_step(model, batch):
    logits, loss = model(*batch)
    return loss

def validation_step(model, batch):
    logits, loss = model(*batch)
    return {"loss": loss, "perplexity": loss.exp()}

def optimizer(model):
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], lr=3e-3)
"""


def test_a_gpt_of_letters_that_returns_logits_and_loss(compare: Run):
    cell = compare(GPT)
    assert "held-out perplexity" in cell.text
    assert "accuracy" not in cell.text


RAGGED = """%%ddp_compare dp ddp async --epochs 1 --batch-size 16 --accumulate 2
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.last = nn.Linear(8, 2)

    def forward(self, texts, lengths):
        packed = pack_padded_sequence(
            self.words(texts), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.last(self.lstm(packed)[1][0][-1])

def model():
    return Classifier()

def data(split):
    generator = torch.Generator().manual_seed(len(split))
    lengths = torch.randint(1, 9, (80,), generator=generator).tolist()
    texts = [torch.randint(1, 30, (length,), generator=generator) for length in lengths]
    return [(text, int(text.sum() % 2)) for text in texts]

def collate_fn(items):
    texts, labels = zip(*items)
    lengths = torch.tensor([len(text) for text in texts])
    return pad_sequence(texts, batch_first=True), lengths, torch.tensor(labels)

def training_step(model, batch):
    texts, lengths, labels = batch
    return nn.functional.cross_entropy(model(texts, lengths), labels)

def validation_step(model, batch):
    texts, lengths, labels = batch
    return {"accuracy": (model(texts, lengths).argmax(1) == labels).float().mean()}
"""


def test_texts_of_different_length_with_collate_fn(compare: Run):
    assert "held-out accuracy" in compare(RAGGED).text


INPUTS = """%%ddp_compare dp ddp async --epochs 1 --batch-size 16
import numpy as np
import torch
from torch import nn

class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Flatten())
        self.table, self.last = nn.Linear(5, 8), nn.Linear(4 * 9 + 8, 3)

    def forward(self, image, table):
        return self.last(torch.cat([self.image(image), self.table(table).relu()], dim=1))

def model():
    return TwoTowers()

def data(split):
    random = np.random.default_rng(0 if split == "train" else 1)
    table = random.normal(size=(96, 5)).astype("float32")
    image = random.normal(size=(96, 1, 8, 8)).astype("float32")
    return {"inputs": {"image": image, "table": table}, "label": table.argmax(1) % 3}

def training_step(model, batch):
    return nn.functional.cross_entropy(model(**batch["inputs"]), batch["label"])
"""


def test_several_inputs_in_nested_dicts(compare: Run):
    compare(INPUTS)


LABELS = """%%ddp_compare dp ddp async --epochs 1 --batch-size 16
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))

def data(split):
    x = torch.randn(96, 8)
    return x, (x[:, :5] > 0).float()

loss = nn.BCEWithLogitsLoss(pos_weight=torch.full((5,), 2.0))

def metric(outputs, targets):
    found = outputs > 0
    hits = (found & targets.bool()).sum()
    return {"precision": hits / found.sum().clamp(min=1), "recall": hits / targets.sum()}
"""


def test_several_labels_a_sample(compare: Run):
    cell = compare(LABELS)
    assert "held-out precision" in cell.text
    assert "held-out recall" in cell.text
    assert "accuracy" not in cell.text


EXPERTS = """%%ddp_compare ddp:find_unused_parameters=on dp async --epochs 1 --batch-size 16
import torch
from torch import nn

class Experts(nn.Module):
    def __init__(self, num=4, width=8):
        super().__init__()
        self.gate = nn.Linear(width, num)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(num)])

    def forward(self, x):
        share, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = chosen == number
            out[rows] = self.experts[number](x[rows]) * share[rows, None]
        return out

def model():
    return nn.Sequential(Experts(), nn.Linear(8, 2))

def data(split):
    x = torch.randn(64, 8)
    x[:, 0] += 3  # so that some experts are seldom chosen
    return x, (x.sum(1) > 3).long()
"""


def test_a_mixture_of_experts(compare: Run):
    compare(EXPERTS)


CYCLE = """%%ddp_compare dp ddp async zero --epochs 2 --batch-size 16
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

def data(split):
    x = torch.randn(96, 8)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())

def optimizer(params, num_steps):
    made = torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True)
    return made, torch.optim.lr_scheduler.OneCycleLR(made, max_lr=0.2, total_steps=num_steps)
"""


def test_one_cycle_of_the_learning_rate(compare: Run):
    assert "held-out accuracy" in compare(CYCLE).text


RESNET = """%%ddp_compare ddp async --epochs 1 --batch-size 8 --lr 0.001
import torch
from torchvision.models import resnet18
from torchvision.transforms import v2

def model():
    return resnet18(num_classes=10)

def data(split):
    pixels = torch.randint(256, (16, 3, 32, 32), dtype=torch.uint8)
    scale = v2.ToDtype(torch.float32, scale=True)
    return scale(pixels), torch.randint(10, (16,))
"""


def test_a_resnet_of_torchvision(compare: Run):
    """Only where there is a build of torchvision for the torch that is installed."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:  # it was built for CUDA
        pytest.skip(f"torchvision: {error}")
    compare(RESNET)
