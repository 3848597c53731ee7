"""``%ddp_predict`` and ``%ddp_advise`` in a real kernel."""

import pytest

from tests.kernel.client import Cell, Kernel


@pytest.fixture(scope="module")
def calibrated(kernel_of_module: Kernel) -> Cell:
    cell = kernel_of_module.run(
        "%ddp_compare ddp --task digits --epochs 2 --name calibrated", timeout=120
    )
    assert not cell.error, cell.error_text
    return cell


def test_a_prediction_is_calibrated_on_a_stored_comparison(calibrated: Cell, kernel: Kernel):
    line = "%ddp_predict --ranks 1,2,4,64 --link 100GbE --strategies ddp,async --run calibrated"
    cell = kernel.run(line)
    assert not cell.error, cell.error_text
    assert "Predicted: calibrated on up to 64 ranks" in cell.text
    assert "Fitted to calibrated: single on 1 rank, no-comm on 2" in cell.text
    assert len(cell.bundles("image/png")) == 1
    assert "<table" in cell.bundles("text/html")[0]
    here = kernel.run("import ddpnb\nddpnb.predict([2, 3, 4], run='calibrated/ddp').save('p.svg')")
    assert not here.error, here.error_text
    for wrong, sentence in (
        ("--ranks 0 --run calibrated", "--ranks 0: give numbers of ranks from 1"),
        ("--link 1Gbit", "--link 1Gbit has no latency"),
        ("--strategies ddb", "There is no strategy 'ddb'"),
        ("--run nothing", "There is no run 'nothing'"),
    ):
        cell = kernel.run(f"%ddp_predict {wrong}")
        assert cell.error == "UserError"
        assert sentence in cell.error_text


def test_options_of_a_prediction_are_completed(kernel: Kernel):
    assert "100GbE" in kernel.complete("%ddp_predict --link 100")
    assert "--critical-batch" in kernel.complete("%ddp_predict --cri")
    assert "async-shards=" in kernel.complete("%ddp_predict --strategies async-")


def test_the_machine_is_measured_and_its_cell_is_marked(kernel: Kernel):
    kernel.run("%%ddp\nimport torch\nnet = torch.nn.Linear(30, 4)\nx = torch.randn(8, 30)")
    cell = kernel.run("%ddp_advise --model net --input x", timeout=90)
    assert not cell.error, cell.error_text
    assert cell.text.count("◀ this machine") == 1
    assert "all-reduce in shared memory" in cell.text
    assert "ms for 8 samples, 496 B of gradients" in cell.text
    assert "<table" in cell.bundles("text/html")[0]
    unknown = kernel.run("%ddp_advise --model nothing --input x")
    assert "nothing is not defined: define it in a %%ddp cell." in unknown.error_text
    after = kernel.run("%%ddp\nprint(net.weight.grad)")  # the copy has the gradients
    assert after.by_rank == {0: ["None"], 1: ["None"]}


def test_without_a_cluster_one_sentence_says_how_to_start_one(bare_kernel: Kernel):
    assert "No cluster is running: start one" in bare_kernel.run("%ddp_advise").error_text
