from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.rig import ALL_REDUCE, DYNAMO
from tests.kernel.client import Kernel, kernel_in


@pytest.fixture(scope="package")
def shared_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel_in(tmp_path_factory.mktemp("project")) as kernel:
        yield kernel


@pytest.fixture(scope="package")
def project(shared_kernel: Kernel) -> Path:
    return shared_kernel.folder


@pytest.fixture
def kernel(shared_kernel: Kernel) -> Kernel:
    """The kernel that all tests share, with two live ranks."""
    return with_two_ranks(shared_kernel)


@pytest.fixture
def unharmed(kernel: Kernel) -> Iterator[Kernel]:
    """Like ``kernel``. After the test the ranks must still sum and have kept their variables."""
    kernel.run("%%ddp\nimport time, torch, torch.distributed as dist\nkept = rank + 10")
    yield kernel
    cell = kernel.run(f"%%ddp\n{ALL_REDUCE}\nkept, total.item()")
    assert cell.by_rank == {0: ["(10, 2.0)"], 1: ["(11, 2.0)"]}, cell.text
    assert cell.seconds < 15


@pytest.fixture(scope="module")
def kernel_of_module(shared_kernel: Kernel) -> Kernel:
    """Like ``kernel``, for fixtures that prepare a test file once."""
    return with_two_ranks(shared_kernel)


def with_two_ranks(kernel: Kernel) -> Kernel:
    assert kernel.run(
        f"""
import os
from ddpnb.cluster.group import bring_back
from ddpnb.session.session import this_session
cluster = this_session()._cluster
if cluster is not None and not cluster.lost and len(cluster.ranks) == 2 and cluster.dead == (1,):
    bring_back(cluster, [1])
if cluster is None or len(cluster.ranks) != 2 or cluster.living != cluster.ranks or cluster.lost:
    this_session().stop()
    os.environ.update({DYNAMO})
    get_ipython().run_line_magic("ddp_start", "-n 2 --device cpu")
    for name in {list(DYNAMO)}:
        del os.environ[name]
    cluster = this_session()._cluster
"""
    ).passed
    return kernel


@pytest.fixture
def bare_kernel(shared_kernel: Kernel) -> Kernel:
    shared_kernel.run("%ddp_stop")
    return shared_kernel
