"""Inspection in a notebook: ``%ddp_inspect``, ``%ddp_check``, ``%ddp_samples``, traces."""

import json
from pathlib import Path

import pytest

from tests.kernel.client import Kernel, both
from tests.rank.test_kinds import BUFFERS, SMALL, UNFROZEN

MODEL = """%%ddp
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        if rank == 1 and self.num_calls == fails_at:
            raise ValueError("on purpose")
        return self.body(x)

torch.manual_seed(rank)
model, fails_at = Net(), 0
ddp = DDP(model)
optimizer = torch.optim.Adam(ddp.parameters())
x, y = torch.randn(6, 8), torch.randint(4, (6,))
ddp(x).pow(2).sum().backward()
optimizer.step()
optimizer.zero_grad()
sharded = fully_shard(nn.Linear(4, 4))
loader = torch.utils.data.DataLoader(list(range(6)), batch_size=2, shuffle=True)
only = model if rank == 0 else None
before = torch.get_rng_state()
"""


@pytest.fixture(scope="module")
def with_model(kernel_of_module: Kernel) -> Kernel:
    assert kernel_of_module.run(MODEL).passed
    return kernel_of_module


@pytest.mark.parametrize("line", ["%ddp_inspect only --batch x", "%ddp_check only"])
def test_what_one_rank_lacks_is_named(with_model: Kernel, line: str):
    assert "Only on rank 1: only is None" in with_model.run(line).refusal


def test_a_step_of_ddp_is_shown_and_changes_nothing(with_model: Kernel):
    cell = with_model.run(
        '%ddp_inspect model --batch x --loss "nn.functional.cross_entropy(output, y)" '
        "--bucket-cap 0.001"
    ).passed
    (html,) = cell.bundles("text/html")
    assert html.count("<img") == 2  # one step for each of two bucket sizes
    assert with_model.value("_.gradient_bytes") == str(4 * (8 * 64 + 3 * 64 + 64 * 4 + 4))
    held = with_model.run(
        "%%ddp\nmodel.num_calls, x.grad, torch.equal(before, torch.get_rng_state())"
    )
    assert held.by_rank == both("(1, None, True)")


def test_a_failure_on_one_rank_frees_the_others(with_model: Kernel):
    with_model.run("%%ddp\nfails_at = 4")
    cell = with_model.run("%ddp_inspect model --batch x")
    assert cell.error == "RankError"
    assert "ValueError: on purpose" in cell.error_text
    with_model.run("%%ddp\nfails_at = 0")
    assert with_model.run("%ddp_inspect model --batch x").passed


def verdicts(kernel: Kernel, line: str) -> dict[str, str]:
    assert kernel.run(f"found = {line}").passed
    found = kernel.value("{f'{e.part} {e.name}'.strip(): e.verdict.name for e in found.findings}")
    return dict(eval(found))


def test_replicas_are_compared_and_a_skipped_step_is_named(with_model: Kernel):
    found = verdicts(with_model, "%ddp_check ddp optimizer sharded")
    assert found.pop("buffers ddp") == "FACT"
    assert found.pop("parameters sharded") == "UNKNOWN"
    assert set(found.values()) == {"SAME"}
    assert verdicts(with_model, "%ddp_check model")["buffers model"] == "FACT"  # ddp contains it
    with_model.run("%%rank 1\nddp.module.body(x).sum().backward()\noptimizer.step()\ndel sharded")
    text = with_model.run("%ddp_check").text
    assert "Number of steps of optimizer: 1 on rank 0 and 2 on rank 1" in text
    assert "step of body.0.weight: rank 0 against rank 1, 1 of 1 element: at most 1 apart" in text
    assert verdicts(with_model, "%ddp_check")["values sharded"] == "UNKNOWN"  # is only on rank 0


def test_samples_are_handed_out_on_the_ranks(with_model: Kernel):
    assert "rank 1   1 3 0" in with_model.run("%ddp_samples -n 5 --epochs 2").text
    assert "the same samples" in with_model.run("%ddp_samples loader --epochs 1").text
    assert "did you mean loader" in with_model.run("%ddp_samples lader").error_text


def test_a_comparison_is_predicted_from_and_looked_into(with_model: Kernel):
    line = "%ddp_compare async ddp --task digits --epochs 1 --slow 1:2x --name kept"
    assert with_model.run(line, timeout=120).passed
    predicted = with_model.run("%ddp_predict --ranks 1,2,64 --link 100GbE --run kept").passed
    assert "Fitted to kept: a step costs" in predicted.text
    # the first two use the last comparison's task, the third its workers' reads and writes
    for line in ("%ddp_advise", "%ddp_inspect", "%ddp_inspect --run kept/async"):
        assert with_model.run(line).passed
    written = "_.updates.version.tolist()"
    assert with_model.value(f"{written} == list(range(1, len(_.updates) + 1))") == "True"


EXCHANGES = """%%ddp --trace
import torch, torch.distributed as dist
x = torch.ones(1000)
dist.all_reduce(x)
group = dist.new_group([0, 1])
dist.broadcast(x, 0, group=group)
print("done")
"""


def test_a_traced_cell_shows_its_time_line_and_can_be_saved(kernel: Kernel, tmp_path: Path):
    cell = kernel.run(EXCHANGES)
    assert cell.by_rank == both("done")
    text = cell.bundles("text/plain")[-1]
    for part in ("rank 0 all_reduce", "4.0 kB, ranks 0-1, line 4", "rank 1 broadcast"):
        assert part in text
    assert cell.pictures
    target = tmp_path / "trace.json"
    kernel.run(f"%ddp_show trace --save {target}")
    names = [event["name"] for event in json.loads(target.read_text())["traceEvents"]]
    assert names.count("all_reduce") == names.count("broadcast") == 2


def test_what_was_exchanged_before_a_failure_and_by_a_script_is_shown(
    kernel: Kernel, tmp_path: Path
):
    cell = kernel.run("%%ddp --trace\nimport torch.distributed as dist\ndist.barrier()\n1 / 0")
    assert cell.error
    assert "rank 1 barrier" in cell.bundles("text/plain")[-1]
    script = tmp_path / "meets.py"
    script.write_text("import torch.distributed as dist\n\ndist.barrier()\n")
    text = kernel.run(f"%ddp_run --trace {script}").bundles("text/plain")[-1]
    assert "rank 0 barrier" in text
    assert "line 3" in text


def test_a_collective_is_run_and_shown(kernel: Kernel):
    cell = kernel.run("%ddp_show reduce --root 1 --op max")
    assert "rank 1: [20 21 22 23] -> [20 21 22 23]" in cell.text
    assert cell.pictures
    assert not kernel.run("%ddp_show all_reduce --ranks 1 --size 4kB").error


FROZEN = """%%ddp
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
net[0].requires_grad_(False)
thawed, update = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1)
for number in range(4):
    net[0].requires_grad_(number > 1)
    update.zero_grad()
    thawed(torch.randn(8, 4)).sum().backward()
    update.step()
"""


def test_a_layer_that_was_frozen_is_the_cause_that_is_named(kernel: Kernel):
    kernel.run(FROZEN).passed  # noqa: B018
    cell = kernel.run("%ddp_check thawed")
    assert "DDP wrapped the model while layers were frozen that train now" in cell.text
    assert "these 2 parameters" in cell.text
    source = SMALL + UNFROZEN
    cell = kernel.run(f"%%ddp_compare ddp zero --no-baseline --batch-size 20 --epochs 3\n{source}")
    shown = kernel.run("%ddp_plot")
    for each in (cell, shown):
        head = "".join(each.bundles("text/html")).partition("How to read this")[0]
        assert "differ at the end" in head
        assert "ddp, zero: first.weight was frozen when the strategy wrapped" in head


def test_a_mismatch_of_buffers_says_so(kernel: Kernel):
    first = 'self.layer = nn.Linear(4, 2)\n        self.register_buffer("b", torch.ones(1))'
    source = SMALL + BUFFERS.replace("self.layer = nn.Linear(4, 2)", first).replace(
        "GROW", "self.b = torch.ones(int((x > 0).sum()))"
    )
    cell = kernel.run(f"%%ddp_compare ddp --no-baseline --batch-size 20 --epochs 3\n{source}")
    assert "DDP makes these calls to send the model's buffers" in cell.error_text
