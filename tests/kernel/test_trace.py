"""What a cell exchanges, seen in a notebook."""

import json
from pathlib import Path

from tests.kernel.client import Kernel, both

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
    assert cell.bundles("image/png")
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
    assert cell.bundles("image/png")
    assert not kernel.run("%ddp_show all_reduce --ranks 1 --size 4kB").error
