"""How does DistributedDataParallel train?  (Every rank.)

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

with g_i the gradient of the mean loss over rank i's b_i samples of the global batch
of B: exactly the gradient of the mean loss over the whole batch, but for what a
compressing hook leaves out.

Reference: Li et al., "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training", PVLDB 13(12), 2020.

Messages per step: one all-reduce for each bucket of gradients (25 MB), sent while
the backward pass still works on the next; with buffers (BatchNorm's statistics)
also one broadcast from rank 0.
Bytes sent per step and rank: 2 (N - 1) / N * S, with S the bytes of all gradients as they
are sent (see ``compression.py``); buffers are not counted.
"""

from collections.abc import Iterator
from typing import Final, final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpnb.errors import UserError
from ddpnb.rank.order import Share
from ddpnb.rank.strategies.base import Batch, Memory, Plan, Replica, State, StepReport, Strategy
from ddpnb.rank.strategies.support.compression import compression
from ddpnb.rank.strategies.support.flat import all_reduce_bytes, memory_of, num_bytes
from ddpnb.rank.strategies.support.overlap import observe
from ddpnb.rank.strategies.support.power import check_matrices
from ddpnb.wire import RankState

_DEFAULT_CAP_MB: Final = 25.0
_ONE_BUCKET_NOTE: Final = (
    "ddp:hook=powersgd sends one bucket: on CPUs torch's hook makes its later calls from other "
    "threads, and those of several buckets would meet in another order on each rank."
)


@final
class Ddp(Strategy):
    """Torch's own ``DistributedDataParallel``, over the default process group.

    Args:
        bucket_cap_mb: how many MB of gradients go in one message; torch's default, 25, makes
            the first bucket one of 1 MB, so that sending begins early.
        static_graph: whether torch may rely on every step using the same parameters.
        hook: how gradients are compressed.
        powersgd_rank: of the matrices that the hook ``powersgd`` sends.
    """

    def __init__(
        self,
        *,
        bucket_cap_mb: float = _DEFAULT_CAP_MB,
        static_graph: bool = False,
        hook: str = "none",
        powersgd_rank: int = 1,
    ) -> None:
        if bucket_cap_mb <= 0:
            raise UserError("ddp:bucket_cap_mb must be greater than 0, e.g. 25.")
        if powersgd_rank != 1 and hook != "powersgd":
            raise UserError("ddp:powersgd_rank goes with ddp:hook=powersgd; give both, or neither.")
        self._bucket_cap_mb = bucket_cap_mb
        self._static_graph = static_graph
        self._hook = hook
        self._powersgd_rank = powersgd_rank

    def plan(self, state: RankState) -> Plan:
        """Every rank."""
        return Plan(num_ranks=state.world_size, num_workers=state.world_size, synchronous=True)

    def check(self, replica: Replica) -> None:
        """Refuse a static graph whose gradients accumulate, and what PowerSGD cannot send."""
        if self._static_graph and replica.accumulate > 1:
            raise UserError(
                "ddp:static_graph=on cannot accumulate gradients (torch's no_sync fails in it); "
                "leave one of the two out."
            )
        if self._hook == "powersgd":
            check_matrices(replica)

    def setup(self, replica: Replica) -> None:
        """Wrap the model, which broadcasts rank 0's weights; takes part: every rank."""
        self._replica = replica
        self._needs_one_bucket = self._hook == "powersgd" and replica.device.type == "cpu"
        self._ddp = DistributedDataParallel(
            replica.model,
            device_ids=[replica.device] if replica.device.type == "cuda" else None,
            bucket_cap_mb=self._cap_mb(replica),
            static_graph=self._static_graph,
        )
        self._compression = compression(
            self._hook, replica.parameters, replica.device, self._powersgd_rank
        )
        self._overlap = observe(self._ddp, self._compression, replica.timer)
        self._optimizer = replica.optimizer(replica.parameters)

    def shares(self) -> Iterator[Share]:
        """This rank's part of every global batch."""
        return self._replica.shares()

    def step(self, batch: Batch) -> StepReport:
        """Train on this rank's part of one global batch; takes part: every rank."""
        # forward; backward, and agree at the same time: DDP averages the gradients bucket by
        # bucket.  It divides by the number of ranks; the weight makes that a mean over samples.
        loss = self._replica.compute_gradients(
            batch,
            weight=self._replica.world_size * batch.weight,
            model=self._ddp,
            unsynced=self._ddp.no_sync,
        )
        self._overlap.tell()
        # update: every rank the same
        self._replica.update(self._optimizer)
        return StepReport(
            loss=loss,
            num_samples=batch.num_samples,
            num_bytes_sent=all_reduce_bytes(
                self._compression.num_bytes(), self._replica.world_size
            ),
        )

    def notes(self) -> tuple[str, ...]:
        """Say where the buckets are not those that were asked for."""
        return (_ONE_BUCKET_NOTE,) if self._needs_one_bucket else ()

    def memory(self) -> Memory:
        """All of both."""
        return memory_of(self._replica.model.parameters(), self._optimizer)

    def finish(self) -> nn.Module:
        """Return the model inside the wrapper."""
        return self._replica.model

    def save(self, replica: Replica) -> State:
        """Return what every strategy needs, and what the hook remembers."""
        return super().save(replica) | {"compression": self._compression.save()}

    def load(self, replica: Replica, state: State) -> None:
        """Go on from there."""
        super().load(replica, state)
        self._compression.load(state.get("compression", {}))

    def close(self) -> None:
        """Nothing to let go of: the process group belongs to the rank."""

    def _cap_mb(self, replica: Replica) -> float | None:
        """Return how large buckets are; None leaves it to torch."""
        if self._needs_one_bucket:
            return num_bytes(replica.parameters) / 2**20 + 1
        return None if self._bucket_cap_mb == _DEFAULT_CAP_MB else self._bucket_cap_mb
