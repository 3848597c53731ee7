"""Predict the next character of a Python source file.  Runs on the ranks.

The text is a part of Python's standard library, which is on every machine. The held-out split
contains other files of this library. The model is a small transformer.

References: Vaswani et al., "Attention Is All You Need", NeurIPS 2017; Xiong et al., "On Layer
Normalization in the Transformer Architecture", ICML 2020 (normalise first).
"""

import platform
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

from ddpnb.rank.tasks.base import Task
from ddpnb.rank.tasks.samples import TensorSamples

TRAIN_FILES = (
    "ast.py",
    "calendar.py",
    "configparser.py",
    "contextlib.py",
    "dataclasses.py",
    "functools.py",
    "heapq.py",
    "shutil.py",
    "statistics.py",
    "textwrap.py",
)
HELD_OUT_FILES = ("bisect.py", "csv.py", "fractions.py", "queue.py")
CONTEXT = 64
"""Number of characters that the model sees at once."""
NUM_SYMBOLS = 97
"""Number of symbols: printable ASCII, the line feed, and one symbol for all other bytes."""
_NEW_LINE, _OTHER = 95, 96
_WIDTH, _NUM_LAYERS, _NUM_HEADS = 64, 2, 4


def build() -> Task:
    """Return the task: 10 training files, 4 held-out files, a transformer with two layers."""
    return Task(
        model=model,
        train=TensorSamples(data("train")),
        held_out=TensorSamples(data("test")),
        notes=(f"The text is the standard library of Python {platform.python_version()}.",),
    )


def model() -> nn.Module:
    """Return the transformer."""
    return Transformer()


def data(split: str) -> tuple[Tensor, Tensor]:
    """Cut files of the standard library into pieces of ``CONTEXT`` symbols.

    The target of each symbol is the next symbol. Inputs and targets have dtype int64 and shape
    (pieces, CONTEXT).
    """
    names = TRAIN_FILES if split == "train" else HELD_OUT_FILES
    folder = Path(sysconfig.get_paths()["stdlib"])
    content = b"".join((folder / name).read_bytes() for name in names)
    codes = torch.tensor(list(content), device="cpu")
    text = torch.where((codes >= 32) & (codes < 127), codes - 32, _OTHER)
    text[codes == ord("\n")] = _NEW_LINE
    num = (len(text) - 1) // CONTEXT
    inputs, targets = text[: num * CONTEXT], text[1 : num * CONTEXT + 1]
    return inputs.view(num, CONTEXT), targets.view(num, CONTEXT)


class Transformer(nn.Module):
    """A model that scores the next symbol at every position.

    Inputs have shape (N, T), and scores have shape (N, ``NUM_SYMBOLS``, T).
    """

    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Embedding(NUM_SYMBOLS, _WIDTH)
        self.position = nn.Embedding(CONTEXT, _WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(_NUM_LAYERS))
        self.last = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, NUM_SYMBOLS))
        for embedding in (self.symbol, self.position):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the scores. Classes are the second dimension, as ``cross_entropy`` requires."""
        length, device = inputs.shape[1], inputs.device
        features = self.symbol(inputs) + self.position(torch.arange(length, device=device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=device)
        for each in self.layers:
            features = each(features, src_mask=mask, is_causal=True)
        scores: Tensor = self.last(features)
        return scores.transpose(1, 2)


def layer() -> nn.Module:
    """Return a layer with attention to earlier symbols and a network that acts on each position."""
    return nn.TransformerEncoderLayer(
        _WIDTH, _NUM_HEADS, 4 * _WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
    )
