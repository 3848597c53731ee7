"""``%ddp_predict`` and ``%ddp_advise`` in a real kernel."""

import pytest

from tests.kernel.client import Kernel


@pytest.fixture(scope="module")
def calibrated(kernel_of_module: Kernel) -> Kernel:
    cell = kernel_of_module.run(
        "%ddp_compare ddp --task digits --epochs 2 --name calibrated", timeout=120
    )
    assert not cell.error, cell.error_text
    return kernel_of_module


def test_a_prediction_is_calibrated_on_a_stored_comparison(calibrated: Kernel):
    line = "%ddp_predict --ranks 1,2,4,64 --link 100GbE --strategies ddp,async --run calibrated"
    cell = calibrated.run(line)
    assert not cell.error, cell.error_text
    assert "Fitted to calibrated: single on 1 rank, no-comm on 2" in cell.text
    assert len(cell.bundles("image/png")) == 1
    assert "<table" in cell.bundles("text/html")[0]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("--ranks 0 --run calibrated", "--ranks 0"),
        ("--link 1Gbit", "no latency"),
        ("--strategies ddb", "'ddb'"),
        ("--run nothing", "'nothing'"),
    ],
)
def test_a_mistake_is_one_sentence(calibrated: Kernel, wrong: str, named: str):
    cell = calibrated.run(f"%ddp_predict {wrong}")
    assert cell.error == "UserError"
    assert named in cell.error_text


def test_the_machine_is_measured_and_its_cell_is_marked(kernel: Kernel):
    cell = kernel.run("%ddp_advise", timeout=90)
    assert not cell.error, cell.error_text
    assert cell.text.count("◀ this machine") == 1
    assert "all-reduce in shared memory" in cell.text


def test_without_a_cluster_one_sentence_says_how_to_start_one(bare_kernel: Kernel):
    assert "No cluster is running: start one" in bare_kernel.run("%ddp_advise").error_text
