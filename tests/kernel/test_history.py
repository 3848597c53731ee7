"""Stored runs: found, shown in full, deleted."""

import pytest

from tests.kernel.client import Cell, Kernel


@pytest.fixture(scope="module")
def stored(kernel_of_module: Kernel) -> Cell:
    """Two comparisons that lie in the store."""
    cell = kernel_of_module.run(
        "%ddp_compare ddp --task digits --epochs 0.5 --repeats 2 --name past\n"
        "%ddp_compare async --task synthetic --epochs 0.1 --no-baseline --name gone",
        timeout=120,
    ).passed
    return cell


def test_runs_are_listed_by_what_they_are(stored: Cell, kernel: Kernel):
    text = kernel.run("%ddp_runs past/ddp").text
    assert "past/ddp" in text
    assert "past/single" not in text
    assert "past/" not in kernel.run("%ddp_runs --last 1").text
    assert "--last" in kernel.run("%ddp_runs --last 0").error_text


def test_all_that_is_needed_to_repeat_one_is_shown(stored: Cell, kernel: Kernel):
    cell = kernel.run("%ddp_runs --show past").passed
    magic = (
        "%ddp_compare ddp --task digits --epochs 0.5 --batch-size 256 --lr 0.05 --momentum 0 "
        "--seed 0 --repeats 2"
    )
    assert magic in cell.text
    assert magic in cell.bundles("text/html")[0]
    for what in ("torch ", "python ", "CPU ", "GPUs ", "threads of each rank ", "backend "):
        assert f"\n{what}" in cell.text
    assert "gloo" in cell.text


def test_deleting_is_said(stored: Cell, kernel: Kernel):
    assert "gone/async" in kernel.run("%ddp_runs").text
    assert kernel.run("%ddp_runs --delete gone").lines == ["Deleted gone/async#1."]
    assert "gone/async" not in kernel.run("%ddp_runs").text
    assert kernel.run("%ddp_runs --delete gone").error == "UserError"
