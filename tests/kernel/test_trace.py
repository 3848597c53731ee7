"""What a cell exchanges, seen in a notebook."""

import json
from pathlib import Path

from tests.kernel.client import Kernel

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
    assert cell.by_rank == {0: ["done"], 1: ["done"]}
    (text,) = cell.bundles("text/plain")
    assert "rank 0 all_reduce" in text
    assert "4.0 kB, ranks 0-1, line 4" in text
    assert "rank 1 broadcast" in text
    assert cell.bundles("image/png")

    target = tmp_path / "trace.json"
    assert "spans" in kernel.run(f"%ddp_show trace --save {target}").text
    names = [event["name"] for event in json.loads(target.read_text())["traceEvents"]]
    assert names.count("all_reduce") == names.count("broadcast") == 2
    store = kernel.run("%ddp_show store").text
    assert "rank 0-1" in store
    assert "waited for" in store
    assert "line 5" in store


def test_a_cell_that_fails_shows_what_it_had_exchanged(kernel: Kernel):
    cell = kernel.run("%%ddp --trace\nimport torch.distributed as dist\ndist.barrier()\n1 / 0")
    assert cell.error
    assert "rank 1 barrier" in cell.bundles("text/plain")[0]


def test_a_script_is_traced_too(kernel: Kernel, tmp_path: Path):
    script = tmp_path / "meets.py"
    script.write_text("import torch.distributed as dist\n\ndist.barrier()\n")
    (text,) = kernel.run(f"%ddp_run --trace {script}").bundles("text/plain")
    assert text.startswith("meets.py on 2 ranks")
    assert "rank 0 barrier" in text
    assert "line 3" in text


def test_a_collective_is_run_and_shown(kernel: Kernel):
    cell = kernel.run("%ddp_show reduce --root 1 --op max")
    (text,) = cell.bundles("text/plain")
    assert "rank 1: [20 21 22 23] -> [20 21 22 23]" in text
    assert "Formula of the bytes that a rank sends" in text
    assert cell.bundles("image/png")
    alone = kernel.run("%ddp_show all_reduce --ranks 1 --size 4kB").text
    assert "There is one rank: nothing is sent." in alone


def test_what_cannot_be_shown_is_one_sentence(kernel: Kernel):
    assert "No rank called a collective" in kernel.run("%%ddp --trace\nx = 1").text
    for line, sentence in (
        ("all_redduce", "did you mean all_reduce"),
        ("broadcast --op max", "leave --op out"),
        ("all_reduce --save x.json", "--save belongs to %ddp_show trace"),
        ("store --size 4MB", "takes no option of a collective"),
    ):
        cell = kernel.run(f"%ddp_show {line}")
        assert cell.error == "UserError"
        assert sentence in cell.error_text
