"""``%ddp_inspect`` in a notebook: pictures, a table, one sentence for a mistake."""

import pytest

from tests.kernel.client import Kernel, both

MODEL = """%%ddp
import torch
from torch import nn
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        if rank == 1 and self.num_calls == fails_at:
            raise ValueError("on purpose")
        return self.body(x)

model, fails_at = Net(), 0
x, y = torch.randn(6, 8), torch.randint(4, (6,))
if rank == 0:
    only_here = model
"""


@pytest.fixture(scope="module")
def with_model(kernel_of_module: Kernel) -> Kernel:
    cell = kernel_of_module.run(MODEL)
    assert not cell.error, cell.error_text
    return kernel_of_module


def test_a_step_of_ddp_is_shown_and_changes_nothing(with_model: Kernel):
    cell = with_model.run(
        '%ddp_inspect model --batch x --loss "nn.functional.cross_entropy(output, y)" '
        "--bucket-cap 0.001"
    )
    assert not cell.error, cell.error_text
    assert len(cell.bundles("image/png")) == 3  # the buckets, and a step with each of two sizes
    assert with_model.value("_.result.gradient_bytes") == str(4 * (8 * 64 + 64 + 64 * 4 + 4))
    held = with_model.run("%%ddp\nmodel.num_calls, model.body[0].weight.grad")
    assert held.by_rank == both("(0, None)")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("only_here --batch x", "On rank 1 alone: only_here is not defined"),
        ("model", "Name the model's input too"),
        ("model --batch x --task digits", "leave one of them out"),
        ("--strategy fsdp --task digits", "'fsdp'"),
        ("--strategy async --bucket-cap 1", "leave --bucket-cap out"),
        ("model --batch x --bucket-cap big", "--bucket-cap takes sizes in MB"),
        ("--task digits --loss y", "--loss goes with a model"),
    ],
)
def test_a_mistake_is_one_sentence(with_model: Kernel, line: str, sentence: str):
    cell = with_model.run(f"%ddp_inspect {line}")
    assert cell.error == "UserError"
    assert sentence in cell.error_text


def test_a_failure_on_one_rank_frees_the_others(with_model: Kernel):
    with_model.run("%%ddp\nfails_at = 4")
    cell = with_model.run("%ddp_inspect model --batch x")
    assert cell.error == "RankError"
    assert "ValueError: on purpose" in cell.error_text
    with_model.run("%%ddp\nfails_at = 0")
    again = with_model.run("%ddp_inspect model --batch x")
    assert not again.error, again.error_text


def test_a_run_of_async_is_inspected(with_model: Kernel):
    cell = with_model.run(
        "%ddp_inspect --strategy async:bound=2 --task digits --batch-size 32 --slow 1:2x"
    )
    assert not cell.error, cell.error_text
    written = "[each.version_written for each in _.result.updates]"
    assert with_model.value(f"{written} == list(range(1, len(_.result.updates) + 1))") == "True"
    with_model.run("%ddp_compare async --task digits --epochs 0.5 --name kept --no-baseline")
    assert not with_model.run("%ddp_inspect --run kept").error
    assert not with_model.run("%ddp_inspect").error  # the task of the last comparison
