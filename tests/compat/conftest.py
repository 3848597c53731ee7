"""A kernel with two ranks that import the packages of the extra ``compat`` once."""

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
    """Skip a test module if a package is not installed, or fail it in CI, which installs all."""
    for name in packages:
        if importlib.util.find_spec(name) is None and not os.environ.get("CI"):
            pytest.skip(f"{name} is not installed. Run `make compat`.", allow_module_level=True)


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name.partition(".")[0]) is not None


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel in its own folder, with two ranks that have imported the packages."""
    offline = {"HF_HUB_OFFLINE": "1", "DDPNB_PRELOAD": " ".join(filter(is_installed, PRELOAD))}
    with kernel_in(tmp_path_factory.mktemp("project"), offline) as kernel:
        assert kernel.run("%ddp_start -n 2 --device cpu", timeout=120).passed
        yield kernel


Run = Callable[[str], Cell]


@pytest.fixture
def run(kernel: Kernel) -> Run:
    """A function that runs a cell and checks that the cell did not fail."""

    def run(source: str) -> Cell:
        return kernel.run(source, timeout=120).passed

    return run


@pytest.fixture
def compare(run: Run, kernel: Kernel) -> Run:
    """A function that runs a comparison, and checks that every strategy was trained."""

    def compare(source: str) -> Cell:
        cell = run(source)
        asked = source.partition("--")[0].split()[1:]
        assert "left out" not in cell.text, cell.text
        assert kernel.value("set(_.runs().status)") == "{'finished'}", cell.text
        trained = kernel.value("set(_.steps().query('loss < 100').strategy)")
        assert all(repr(word) in trained for word in asked), cell.text
        return cell

    return compare
