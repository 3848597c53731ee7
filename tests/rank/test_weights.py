"""Do averages of two workers' weights keep the mean, and does every wait for a lock end?"""

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist

from ddpnb.rank.comm.flat_buffers import create_shared_file, map_copies, packed_num_bytes
from ddpnb.rank.comm.rendezvous import CancellationToken, RankLostError, WorkerConfig
from ddpnb.rank.comm.work_queue import SharedWeights
from ddpnb.rank.strategies.gossip import choose_peer

LIKE = [torch.empty(400, 500), torch.empty(2, dtype=torch.float64)]


def weights_in(folder: Path, num_copies: int, timeout_seconds: float = 60.0, cancellation=None):
    path = folder / "weights"
    copies = map_copies(path, LIKE, num_copies)
    config = WorkerConfig(
        rank=0,
        world_size=num_copies,
        folder=folder,
        name="test",
        timeout_seconds=timeout_seconds,
        cancellation=cancellation or CancellationToken(),
    )
    return SharedWeights(path, copies, config), copies


def some_weights(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(like.shape, generator=generator, dtype=like.dtype) for like in LIKE]


def write(weights: SharedWeights, copies, rank: int, values: list[torch.Tensor]) -> None:
    with weights.locked(rank):
        for slot, value in zip(copies[rank].tensors, values, strict=True):
            slot.copy_(value)


def average_often(state, folder):
    if state.rank == 0:
        create_shared_file(folder / "weights", state.world_size * packed_num_bytes(LIKE))
    dist.barrier()
    weights, copies = weights_in(folder, state.world_size)
    write(weights, copies, state.rank, some_weights(state.rank))
    dist.barrier()
    for step in range(300):
        with weights.averaged(
            state.rank, choose_peer(0, state.rank, step, range(state.world_size))
        ):
            pass
    dist.barrier()
    weights.close()
    weights.close()
    (folder / "weights").unlink(missing_ok=True)
    return [[tensor.clone() for tensor in packed.tensors] for packed in copies]


def test_averages_in_pairs_keep_the_mean_and_lead_to_it(ranks):
    expected = [
        torch.stack(same).mean(dim=0) for same in zip(*map(some_weights, range(3)), strict=True)
    ]
    for found in ranks(3).call(average_often)[0]:
        for mine, mean in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, mean, atol=1e-5, rtol=0)


def test_two_take_the_mean_and_a_third_stays(tmp_path):
    create_shared_file(tmp_path / "weights", 3 * packed_num_bytes(LIKE))
    weights, copies = weights_in(tmp_path, 3)
    for rank in range(3):
        write(weights, copies, rank, [torch.full_like(like, 4.0 * rank) for like in LIKE])
    with weights.averaged(1, 0), weights.averaged(2, None):
        pass
    for copied, value in zip(copies, [2.0, 2.0, 8.0], strict=True):
        assert all((tensor == value).all() for tensor in copied.tensors)
    weights.close()


def wait_for_a_lock(state, folder):
    """Rank 0 holds its lock; rank 1 waits for it until its time is up or it is cancelled."""
    if state.rank == 0:
        create_shared_file(folder / "weights", 2 * packed_num_bytes(LIKE))
    dist.barrier()
    cancellation = CancellationToken()
    weights, _ = weights_in(folder, 2, 0.2, cancellation)
    causes = []
    with weights.averaged(0, None) if state.rank == 0 else contextlib.nullcontext():
        dist.barrier()
        for _ in range(2 * state.rank):
            try:
                with weights.locked(0):
                    pass
            except RuntimeError as error:
                causes.append(error)
            cancellation.abort()
        dist.barrier()
    weights.close()
    (folder / "weights").unlink(missing_ok=True)
    return causes


def test_a_wait_for_a_lock_ends_in_time(ranks):
    _, (late, abort) = ranks(2).call(wait_for_a_lock)
    assert isinstance(late, RankLostError)
    assert "freed from its wait" in str(abort)
