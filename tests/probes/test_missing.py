"""A session still works if every probe fails, as with versions that ddpnb does not know."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpnb.compat import torch_internals
from tests.kernel.client import Kernel, both, kernel_in
from tests.probes.test_probes import PROBES

SENTENCES = [each.sentence for each in PROBES.values()]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel with two ranks, in which every probe fails."""
    here = Path(__file__).parent
    paths = [str(here / "broken"), str(here.parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with kernel_in(tmp_path_factory.mktemp("project"), environment) as kernel:
        assert_all_shown(kernel.run("%ddp_start -n 2 --device cpu").passed.text)
        yield kernel


def assert_all_shown(text: str) -> None:
    assert [text.count(each) for each in SENTENCES] == [1] * len(SENTENCES), text


def test_status_shows_each_missing_feature_once(kernel: Kernel):
    assert_all_shown(kernel.run("%ddp_status").text)
    assert_all_shown(kernel.run("import ddpnb; print(ddpnb.debug_info())").text)


def test_a_cell_runs_and_its_output_comes_at_its_end(kernel: Kernel):
    cell = kernel.run(
        """%%ddp --name mine
import sys, torch, torch.distributed as dist, ddpnb
from IPython.display import display, HTML
total = torch.ones(1)
dist.all_reduce(total)
ddpnb.log(loss=1.0, samples=3)
print("sum", total.item())
print("aside", file=sys.stderr)
display(HTML("<b>shown</b>"))
print(hasattr(dist.ProcessGroup.allreduce, "__wrapped__"))
total.shape
"""
    ).passed
    assert cell.by_rank == both("sum 2.0", "False", "", "torch.Size([1])")
    assert "aside" in cell.stderr
    assert cell.bundles("text/html").count("<b>shown</b>") == 1
    assert "mine" in kernel.run("%ddp_runs").text


def test_mistakes_are_shown_and_refused(kernel: Kernel):
    assert "ZeroDivisionError" in kernel.run("%%rank 1\n1 / 0").error_text
    cell = kernel.run("%%ddp --check\ndist.all_reduce(torch.ones(3 + rank))", timeout=90)
    assert "all_reduce" in cell.error_text.lower() or "ALLREDUCE" in cell.error_text
    assert kernel.run("%%ddp\nprint(1)").by_rank == both("1")
    assert "--epochz" in kernel.run("%ddp_compare ddp --task digits --epochz 1").error_text


def test_strategies_are_trained_and_zero_alone_is_refused_in_a_sentence(kernel: Kernel):
    line = "%ddp_compare ddp async --task digits --epochs 1 --data-workers 1"
    cell = kernel.run(line, timeout=200).passed
    assert "ddp" in cell.text
    assert "async" in cell.text
    cell = kernel.run("%ddp_compare zero --task digits --epochs 1", timeout=200)
    assert torch_internals.lists_step_hooks.sentence in cell.error_text
