"""Every example of ``docs/your-code.md`` runs, after the code that its text assumes."""

import re
from pathlib import Path

import pytest

from tests.compat.conftest import Run, require

require("lightning", "transformers")

PAGE = Path(__file__).parents[2] / "docs" / "your-code.md"
LINE = "%%ddp_compare dp ddp async --no-baseline --epochs 1 --batch-size 16\n"
TORCH = "import torch\nfrom torch import nn\n"
SUPPOSED = {
    "How do I define a loss and a metric?": """
def model(): return nn.Linear(8, 1)
def data(split):
    x = torch.randn(64, 8)
    return x, (x.sum(1) > 0).long()
""",
    "How do I define the training step?": """
from transformers import GPT2Config, GPT2ForSequenceClassification
def model():
    shape = dict(n_positions=8, n_embd=8, n_layer=1, n_head=1)
    return GPT2ForSequenceClassification(GPT2Config(vocab_size=20, pad_token_id=0, **shape))
def data(split):
    return {"input_ids": torch.randint(1, 20, (64, 6)), "labels": torch.randint(2, (64,))}
""",
    "How do I choose the optimizer and the schedule?": """
def model(): return nn.Linear(8, 2)
def data(split): return torch.randn(64, 8), torch.randint(2, (64,))
""",
}
"""The first part of a cell, by section. The section's examples are the rest of the cell."""
EARLIER = {
    "How do I train a GAN, use several optimizers or average weights?": """
def Generator(): return nn.Linear(64, 8)
def Critic(): return nn.Linear(8, 1)
def critic_loss(judge, real, fake): return judge(fake).mean() - judge(real).mean()
def maker_loss(judge, fake): return -judge(fake).mean()
""",
}
"""Names that an earlier cell defined on the ranks, by section."""
NOTEBOOK = {
    "Can I pass functions instead of a cell?": f"""import ddpnb
{TORCH}
def Net(): return nn.Linear(8, 2)
def load(split): return torch.randn(512, 8), torch.randint(2, (512,))
my_loss = nn.CrossEntropyLoss()
""",
}
"""Names that the notebook defined, by section."""
CHANGED = {"class Gan:": "def data(split): return torch.randn(256, 8)\n\nclass Gan:"}


def examples() -> list[tuple[str, str]]:
    """Return the section title and the source of each example."""
    found = []
    for section in re.split(r"^##+ ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0].strip()
        found += [(title, each) for each in re.findall(r"```python\n(.*?)```", section, re.DOTALL)]
    return found


def test_all_are_found():
    assert len(examples()) == 9
    assert {*SUPPOSED, *EARLIER, *NOTEBOOK} < {title for title, _ in examples()}


@pytest.mark.parametrize(("title", "example"), examples())
def test_an_example_runs(run: Run, compare: Run, title: str, example: str):
    for old, new in CHANGED.items():
        example = example.replace(old, new)
    if title in EARLIER:
        run(f"%%ddp\n{TORCH}{EARLIER[title]}")
    if title in NOTEBOOK:
        run(NOTEBOOK[title] + example)
    elif example.startswith("%%"):
        compare(example)
    else:
        compare(LINE + TORCH + SUPPOSED[title] + example)
