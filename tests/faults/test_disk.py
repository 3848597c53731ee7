"""Runs are written to a disk that is full."""

from pathlib import Path

from ddpnb.history.store import FILE_NAME
from tests.cluster.rig import DYNAMO
from tests.kernel.client import Kernel

COMPARE = "%ddp_compare ddp --task digits --epochs 8 --no-baseline --name {name}"
"""It sends its steps several times, at intervals of half a second."""
BEGIN = "%load_ext ddpnb\n%ddp_start -n 2 --device cpu"


LIMIT = """
import resource, signal
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, hard))
"""


def test_a_training_goes_on_when_the_file_may_not_grow(tmp_path: Path) -> None:
    """A quota, which needs no right to set; a full disk raises the same."""
    (tmp_path / "data").mkdir()
    (tmp_path / "notebooks").mkdir()
    kernel = Kernel(tmp_path, DYNAMO)

    def train(name: str) -> str:
        cell = kernel.run(COMPARE.format(name=name), timeout=120)
        assert not cell.error, cell.error_text
        return cell.text

    try:
        assert not kernel.run(BEGIN).error
        train("before")
        size = (tmp_path / "data" / "runs" / FILE_NAME).stat().st_size
        assert not kernel.run(LIMIT.format(size=size)).error
        assert train("limited").count("The runs are not being saved") == 1
        assert "before" in kernel.run("%ddp_runs").text
        assert not kernel.run("resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))").error
        train("without-limit")
        assert "without-limit" in kernel.run("%ddp_runs").text
    finally:
        kernel.stop()
