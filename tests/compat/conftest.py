"""A kernel with two ranks, to which the extra's packages are imported once."""

import importlib.util
import os
from collections.abc import Callable, Iterator

import pytest

from tests.kernel.client import Cell, Kernel, kernel_in

PRELOAD = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.rpc",
    "torch.distributed.tensor.parallel",
    "accelerate",
    "torchmetrics",
    "lightning.pytorch",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
)


def require(*packages: str) -> None:
    """Skip a module whose packages are not installed; fail in CI, which installs them."""
    for name in packages:
        if importlib.util.find_spec(name) is None and not os.environ.get("CI"):
            pytest.skip(f"{name} is not installed: make compat", allow_module_level=True)


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name.partition(".")[0]) is not None


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel in a folder of its own, with two ranks that have imported what they need."""
    offline = {"HF_HUB_OFFLINE": "1", "DDPNB_PRELOAD": " ".join(filter(is_installed, PRELOAD))}
    with kernel_in(tmp_path_factory.mktemp("project"), offline) as kernel:
        assert kernel.run("%ddp_start -n 2 --device cpu", timeout=120).passed
        yield kernel


Run = Callable[[str], Cell]
"""Runs a cell."""


@pytest.fixture
def run(kernel: Kernel) -> Run:
    """Run a cell that must not fail; afterwards the ranks must still be able to meet."""

    def run(source: str) -> Cell:
        return kernel.run(source, timeout=120).passed

    return run


@pytest.fixture
def compare(run: Run, kernel: Kernel) -> Run:
    """Run a comparison, in which every strategy must be trained, with losses that are numbers."""

    def compare(source: str) -> Cell:
        cell = run(source)
        asked = source.partition("--")[0].split()[1:]
        assert "left out" not in cell.text, cell.text
        assert kernel.value("set(_.to_frame().status)") == "{'finished'}", cell.text
        trained = kernel.value("set(_.steps().query('loss < 100').strategy)")
        assert all(repr(word) in trained for word in asked), cell.text
        return cell

    return compare
