"""Is the all-reduce in shared memory right, and are its waits freed where a rank dies?"""

import os
import random
import signal
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddpnb.protocol.errors import UserError
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.errors import ConsequenceError
from ddpnb.rank.failures import is_consequence
from ddpnb.rank.meter import Meter, Timer
from ddpnb.rank.servers.rendezvous import WorkerConfig
from ddpnb.rank.servers.shared_sum import CHUNK_BYTES, SharedAllReduce
from ddpnb.rank.strategies import ddp_shm
from tests.rank.fit import Problem, by_strategy
from tests.rank.ranks import make_state
from tests.rank.test_ddp import timed_job

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def opened(state, folder: Path, timeout_seconds: float = 30.0, **fields) -> SharedAllReduce:
    config = WorkerConfig(
        rank=state.rank,
        world_size=state.world_size,
        folder=folder,
        name="test",
        timeout_seconds=timeout_seconds,
        cancellation=CancellationToken(),
        **fields,
    )
    return SharedAllReduce(config)


def whole_numbers(rank: int, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers so small that their sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(number * 16 + rank)
    return torch.randint(-16, 16, (size,), generator=generator).to(dtype)


def stress(state, folder, num_rounds, most):
    """Add tensors of random sizes, at random moments; return how many were wrong."""
    sizes, pauses = random.Random(7), random.Random(state.rank)
    num_wrong = 0
    with closing(opened(state, folder)) as shared:
        torch.distributed.barrier()
        assert list(folder.iterdir()) == []
        for number in range(num_rounds):
            size, dtype = sizes.choice([1, 2, 3, sizes.randint(1, most)]), sizes.choice(DTYPES)
            if pauses.random() < 0.02:
                time.sleep(pauses.random() * 0.002)
            flat = whole_numbers(state.rank, number, size, dtype)
            shared.all_reduce(flat)
            ranks = range(state.world_size)
            expected = sum(whole_numbers(rank, number, size, dtype) for rank in ranks)
            num_wrong += not torch.equal(flat, expected)
    return num_wrong


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_thousands_of_small_sums_of_any_size_and_type_are_right(ranks, num_ranks):
    assert ranks(num_ranks).call(stress, 3000, 5000) == [0] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_tensors_of_many_pieces_are_right(ranks, num_ranks):
    assert ranks(num_ranks).call(stress, 40, CHUNK_BYTES) == [0] * num_ranks


class LateReader(Timer):
    """Now and then sleeps when a wait ends: this rank reads late what others have written."""

    def __init__(self, rank: int) -> None:
        self.pauses, self.phase = random.Random(rank), "backward"

    def begin(self, phase, at=None):
        before, self.phase = self.phase, phase
        if before == "waiting" and self.pauses.random() < 0.3:
            time.sleep(0.01)
        return before

    def moment(self):
        return None

    def hide(self, begun, ended):
        raise AssertionError("it hides nothing")


def late_readers(state, folder, num_rounds):
    """Add tensors of many pieces."""
    num_wrong = 0
    with closing(opened(state, folder, meter=Meter(LateReader(state.rank)))) as shared:
        for number in range(num_rounds):
            size = 3 * CHUNK_BYTES
            flat = whole_numbers(state.rank, number, size, torch.float32)
            shared.all_reduce(flat)
            ranks = range(state.world_size)
            expected = sum(whole_numbers(rank, number, size, torch.float32) for rank in ranks)
            num_wrong += not torch.equal(flat, expected)
    return num_wrong


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_no_rank_overwrites_what_another_has_yet_to_read(ranks, num_ranks):
    assert ranks(num_ranks).call(late_readers, 8) == [0] * num_ranks


def same_bits(state, folder):
    with closing(opened(state, folder)) as shared:
        flat = torch.randn(300_001, generator=torch.Generator().manual_seed(state.rank))
        shared.all_reduce(flat)
        return flat


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_sum_has_the_same_bits_on_every_rank(ranks, num_ranks):
    first, *others = ranks(num_ranks).call(same_bits)
    assert all(torch.equal(first, other) for other in others)


def sum_until_it_fails(state, folder, fault):
    with closing(opened(state, folder, timeout_seconds=1.0 if fault == "hang" else 30.0)) as shared:
        for number in range(1000):
            if state.rank == 1 and number == 20:
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "raise":
                    raise ZeroDivisionError
                time.sleep(3)
            shared.all_reduce(torch.ones(1000))


@pytest.mark.parametrize("fault", ["kill", "raise"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_where_a_rank_leaves_the_others_fail_at_once(fresh_ranks, num_ranks, fault):
    started = time.monotonic()
    results = fresh_ranks(num_ranks).attempt(sum_until_it_fails, fault)
    assert time.monotonic() - started < 20
    for rank, result in enumerate(results):
        if rank != 1:
            assert isinstance(result.cause, RuntimeError)
            assert is_consequence(result.cause)


def kill_rank_1(rank: int, step: int) -> None:
    if rank == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)


def test_where_a_rank_dies_in_training_the_others_fail_at_once(fresh_ranks):
    started, group = time.monotonic(), fresh_ranks(3)
    first, _, third = group.attempt(by_strategy, "ddp-shm", Problem(num_epochs=50), kill_rank_1)
    assert time.monotonic() - started < 20
    assert is_consequence(first.cause)
    assert is_consequence(third.cause)
    assert list(group.folder.iterdir()) == []


def test_where_a_rank_hangs_the_other_gives_up(fresh_ranks):
    first, _ = fresh_ranks(2).attempt(sum_until_it_fails, "hang")
    assert "silent for too long" in str(first.cause)


def interrupted_training(state, folder):
    """Rank 0 is interrupted while it waits for rank 1, which waits for that."""
    freed = folder / "freed"

    def interrupt() -> None:
        time.sleep(0.5)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def before_step(rank: int, step: int) -> None:
        if rank == 0 and step == 3:
            threading.Thread(target=interrupt).start()
        deadline = time.monotonic() + 20
        while rank == 1 and step == 3 and not freed.exists():
            assert time.monotonic() < deadline, "rank 0 was not freed"
            time.sleep(0.05)

    try:
        by_strategy(state, folder, "ddp-shm", Problem(), before_step)
    except BaseException as error:  # noqa: BLE001  # the test judges it
        freed.touch()
        return type(error)
    return None


def test_an_interrupt_reaches_a_rank_that_waits(fresh_ranks):
    assert fresh_ranks(2).call(interrupted_training) == [
        KeyboardInterrupt,
        ConsequenceError,
    ]


def test_ranks_of_several_hosts_are_refused(ranks):
    for result in ranks(2).attempt(apart, Problem()):
        assert isinstance(result.cause, UserError)


def test_gpus_are_refused():
    with pytest.raises(UserError, match="compare ddp"):
        ddp_shm.DdpShm().plan(replace(make_state(0, 2), device="cuda:0"))


def apart(state, folder, problem):
    """Train in a folder of this rank's own."""
    own = folder / f"own-{state.rank}"
    own.mkdir()
    try:
        return by_strategy(state, own, "ddp-shm", problem)
    finally:
        own.rmdir()


def test_waiting_is_timed_apart_from_copying(ranks):
    for timings in ranks(2).call(timed_job, "ddp-shm", 6):
        assert all(parts.waiting > 0 and parts.communication > 0 for _, parts in timings)
        assert all(parts.hidden == 0 for _, parts in timings)


def test_close_may_be_called_twice_and_before_setup():
    strategy = ddp_shm.DdpShm()
    strategy.close()
    strategy.close()
