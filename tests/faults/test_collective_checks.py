"""ddpnb rejects mismatching collectives before gloo ends a process, and rejects no others."""

import re

import pytest

from ddpnb.cluster.cluster import Cluster
from tests.cluster.rig import run
from tests.faults.conftest import check_they_go_on

WRONG = {
    "type": (
        "dist.all_reduce(torch.ones(3, dtype=torch.float64 if rank else torch.float32))",
        r"rank 0 calls all_reduce with Float \[3\] .*, but ranks? [12,-]+ .* with Double \[3\]",
    ),
    "one rank skips an all_reduce": (
        "if rank: dist.all_reduce(x)\ndist.all_reduce(torch.ones(7))",
        r"rank 0 calls all_reduce with Float \[7\] \(line 2\), "
        r"but ranks? [12,-]+ calls? all_reduce with Float \[3\] \(line 1\)",
    ),
    "three ranks in two calls and none": (
        "if rank == 0: dist.barrier()\nelif rank == 1: dist.all_reduce(x)",
        r"rank 0 calls barrier \(line 1\), but rank 1 calls all_reduce with Float \[3\] \(line 2\)",
    ),
    "asynchronous": (
        "work = dist.all_reduce(torch.ones(4 if rank else 3), async_op=True)\nwork.wait()",
        r"rank 0 calls all_reduce with Float \[3\] \(line 1\), but .* with Float \[4\] \(line 1\)",
    ),
}


@pytest.mark.parametrize(("source", "expected"), WRONG.values(), ids=WRONG)
def test_calls_that_do_not_match_are_refused_and_nothing_is_lost(
    quick: Cluster, source: str, expected: str
) -> None:
    ended = run(quick, source)
    named = [f for f in ended.failures.values() if f.name == "CollectiveMismatchError"]
    assert any(re.search(expected, failure.text) for failure in named), ended.failures
    assert all(f in named or f.is_consequence for f in ended.failures.values())
    for lines in (failure.traceback for failure in named):  # the traceback ends at the user's line
        assert any("----> " in re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines)
        assert not any("distributed_c10d.py" in line or "intercept.py" in line for line in lines)
    assert not ended.lost
    assert not ended.hang
    assert ended.seconds < 15, "usually 6 s, longer on a busy machine"


def test_a_message_outside_the_hosts_memory_is_refused(three: Cluster) -> None:
    source = "if rank < 2: dist.send(torch.ones(3, device='meta'), 1 - rank)"
    ended = run(three, source)
    assert {rank: f.name for rank, f in ended.failures.items()} == dict.fromkeys(
        (0, 1), "ValueError"
    )


def test_a_checked_cell_compares_exact_shapes_too(three: Cluster) -> None:
    source = "dist.all_reduce(torch.ones(2, 2) if rank else torch.ones(4))"
    ended = run(three, source, is_checked=True)
    expected = r"calls of the ranks do not match: rank 0 .* Float \[4\] .*, but .* Float \[2, 2\]"
    assert any(re.search(expected, failure.text) for failure in ended.failures.values())
    assert not ended.lost
    check_they_go_on(three, is_checked=True)


def test_a_group_is_compared_anew_after_it_was_destroyed(three: Cluster) -> None:
    ended = run(
        three,
        "dist.all_reduce(x)\n"
        "dist.destroy_process_group()\n"
        "dist.init_process_group('gloo', rank=rank, world_size=world_size)\n"
        "dist.all_reduce(torch.ones(11))",
    )
    assert not ended.failures
