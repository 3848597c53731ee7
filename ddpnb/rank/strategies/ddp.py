"""DistributedDataParallel (every rank).

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

with g_i the gradient of the mean loss over rank i's b_i samples of the global batch
of B: exactly the gradient of the mean loss over the whole batch, unless a hook compresses it.

With ``hook`` torch's own hooks compress gradients before they are sent:

    fp16        as float16: half the bytes of float32; values above 65504 become infinite
    bf16        as bfloat16: half the bytes, the range of float32, 8 bits of precision
    powersgd    each matrix of gradients as the product of two thin ones of a given rank; the
                error is added to the next step's gradients (error feedback)

References: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", PVLDB 13(12), 2020; Vogels et al., "PowerSGD: Practical Low-Rank Gradient
Compression for Distributed Optimization", NeurIPS 2019.

Messages per step: one all-reduce for each bucket of gradients (25 MB), sent while
the backward pass still works on the next; with buffers (BatchNorm's statistics)
also one broadcast from rank 0.
Bytes sent per step and rank: 2 (N - 1) / N * S, with S the bytes of all gradients as they are
sent; buffers are not counted.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddpnb.compat.torch_internals import DdpTimers, times_ddp
from ddpnb.protocol.errors import UserError
from ddpnb.rank.comm.flat_buffers import all_reduce_bytes, num_bytes
from ddpnb.rank.strategies.base import State, SynchronousStrategy
from ddpnb.rank.strategies.replica import Batch, Moment, NullTimer, Replica, StepReport, Timer

_FEWEST_PLAIN_STEPS: Final = 2
"""PowerSGD cannot compress earlier: DDP forms its final buckets after the first step."""

_DEFAULT_CAP_MB: Final = 25.0
_ONE_BUCKET_NOTE: Final = (
    "ddp:hook=powersgd sends one bucket: on CPUs torch's hook makes its later calls from other "
    "threads, and ranks would make those of several buckets in different orders."
)
_RESUMED_NOTE: Final = (
    "ddp:hook=powersgd starts afresh when a run is resumed: {num} steps without "
    "compression, and no error feedback from before."
)

CommHook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]
"""Sends one bucket of gradients, and returns the future of the averaged one."""


class DdpStrategy(SynchronousStrategy):
    """Trains through torch's ``DistributedDataParallel``.

    In its ``setup`` a subclass calls ``wrap``, and sets ``report_overlap``.
    """

    wraps_model = True
    needs_all_gradients = True

    report_overlap: Callable[[], None]
    """Reports the communication in the backward pass that has just ended."""

    def wrap(self, replica: Replica, **options: Any) -> None:
        """Wrap the model, which broadcasts rank 0's weights; takes part: every rank."""
        device_ids = [replica.device] if replica.device.type == "cuda" else None
        self._ddp = DistributedDataParallel(replica.model, device_ids=device_ids, **options)
        self._divisor = replica.world_size
        """By what a sum over ranks is divided before it becomes the gradient."""

    def step(self, batch: Batch) -> StepReport:
        """Train on this rank's part of one global batch; takes part: every rank."""
        replica = self._replica
        # forward; backward and, at the same time, agree: DDP averages the gradients bucket by
        # bucket.  It divides by the number of ranks; the weight makes that a mean over samples.
        loss = replica.compute_gradients(
            batch, weight=self._divisor * batch.weight, model=self._ddp, unsynced=self._ddp.no_sync
        )
        self.report_overlap()
        # update: every rank the same (in zero each its part, which it then sends)
        replica.update(self._optimizer)
        num_sent = self.num_bytes_sent()
        return batch.report(
            loss, num_bytes_sent=num_sent, num_bytes_received=self.num_bytes_received(num_sent)
        )

    @abstractmethod
    def num_bytes_sent(self) -> int:
        """Return the bytes that this rank has sent in the last step."""

    def num_bytes_received(self, num_sent: int) -> int:
        """Return those that it has received: as many as it has sent, in an all-reduce."""
        return num_sent


@final
class Ddp(DdpStrategy):
    """Torch's own ``DistributedDataParallel``, over the default process group.

    Args:
        bucket_cap_mb: MB of gradients in one message; at torch's default, 25, the first bucket
            has 1 MB, so that sending begins early.
        static_graph: whether torch may assume that every step uses the same parameters.
        hook: how gradients are compressed.
        powersgd_rank: of the matrices that ``powersgd`` sends.
        powersgd_start: steps without compression before ``powersgd`` compresses, torch's
            ``start_powerSGD_iter``: early gradients, which change fast, are approximated worst.
        find_unused_parameters: whether a step need not use all parameters.
        bucket_view: torch's ``gradient_as_bucket_view``: each ``grad`` is a part of the bucket
            that is sent, and is not copied into it and back.

    Raises:
        UserError: an option of ``powersgd`` without it.
    """

    def __init__(
        self,
        *,
        bucket_cap_mb: float = _DEFAULT_CAP_MB,
        static_graph: bool = False,
        hook: str = "none",
        powersgd_rank: int = 1,
        powersgd_start: int = _FEWEST_PLAIN_STEPS,
        find_unused_parameters: bool = False,
        bucket_view: bool = False,
    ) -> None:
        alone = {"rank": powersgd_rank != 1, "start": powersgd_start != _FEWEST_PLAIN_STEPS}
        for option, is_given in alone.items():
            if is_given and hook != "powersgd":
                raise UserError(
                    f"ddp:powersgd_{option} goes with ddp:hook=powersgd; give both, or neither."
                )
        self._bucket_cap_mb = bucket_cap_mb
        self._static_graph = static_graph
        self._hook = hook
        self._powersgd_rank = powersgd_rank
        self._powersgd_start = powersgd_start
        self._bucket_view = bucket_view
        self._finds_unused = find_unused_parameters
        self.needs_all_gradients = not (find_unused_parameters or static_graph)
        self._power_state: PowerSGDState | None = None
        self._num_sent_before = 0
        self._is_resumed = False

    def check(self, replica: Replica) -> None:
        """Refuse accumulation in a static graph, and gradients that PowerSGD cannot send."""
        if self._static_graph and replica.accumulate > 1:
            raise UserError(
                "ddp:static_graph=on cannot accumulate gradients (torch's no_sync fails in it); "
                "leave one of the two out."
            )
        if self._hook == "powersgd":
            _check_matrices(replica)

    def setup(self, replica: Replica) -> None:
        """Wrap the model, which broadcasts rank 0's weights; takes part: every rank."""
        super().setup(replica)
        self._needs_one_bucket = self._hook == "powersgd" and replica.device.type == "cpu"
        self.wrap(
            replica,
            bucket_cap_mb=self._cap_mb(),
            static_graph=self._static_graph,
            find_unused_parameters=self._finds_unused,
            gradient_as_bucket_view=self._bucket_view,
        )
        hook = self._comm_hook()
        self.report_overlap = observe(self._ddp, replica.timer, hook, self._power_state)

    def held(self) -> Iterable[object]:
        """Return what PowerSGD remembers from step to step."""
        return () if self._power_state is None else (self._power_state,)

    def notes(self) -> tuple[str, ...]:
        """Report where buckets differ from the options, and what was not resumed."""
        one_bucket = (_ONE_BUCKET_NOTE,) if self._needs_one_bucket else ()
        is_new = self._power_state is not None and self._is_resumed
        resumed = _RESUMED_NOTE.format(num=self._powersgd_start)
        return one_bucket + ((resumed,) if is_new else ())

    def load(self, replica: Replica, state: State) -> None:
        """Continue from there, without a hook's memory of earlier steps."""
        super().load(replica, state)
        self._is_resumed = True

    def _comm_hook(self) -> CommHook | None:
        """Return the hook that sends gradients; takes part: every rank."""
        match self._hook:
            case "fp16":
                return fp16_compress_hook
            case "bf16":
                _refuse_without_bf16(self._replica.device)
                return _bf16
            case "powersgd":
                self._power_state = PowerSGDState(
                    process_group=None,
                    matrix_approximation_rank=self._powersgd_rank,
                    start_powerSGD_iter=self._powersgd_start,
                )
                return powerSGD_hook
            case _:
                return None

    def num_bytes_sent(self) -> int:
        """Return those of an all-reduce of the last step's gradients, as they were sent."""
        return all_reduce_bytes(self._gradient_bytes(), self._replica.world_size)

    def _gradient_bytes(self) -> int:
        parameters = self._replica.parameters
        size, num_values = num_bytes(parameters), sum(p.numel() for p in parameters)
        if self._power_state is not None:
            num_in_all = self._power_state.total_numel_after_compression
            num_sent = num_in_all - self._num_sent_before  # 0 in the plain steps
            self._num_sent_before = num_in_all
            return size * num_sent // num_values if num_sent else size
        return size if self._hook == "none" else 2 * num_values

    def _cap_mb(self) -> float | None:
        """Return the size of buckets; None: torch's default."""
        if self._needs_one_bucket:
            return num_bytes(self._replica.parameters) / 2**20 + 1
        return None if self._bucket_cap_mb == _DEFAULT_CAP_MB else self._bucket_cap_mb


def observe(
    ddp: DistributedDataParallel, timer: Timer, hook: CommHook | None = None, state: object = None
) -> Callable[[], None]:
    """Send gradients by a hook, and time how much of DDP's communication hides.

    Buckets of gradients are sent while earlier layers' gradients are still computed.  Once the
    last gradient is there, the rest is exposed: the backward pass waits for it.

    On a CPU, DDP's own timers are read after each backward pass, at some 50 us a step; a hook in
    Python costs up to a twentieth of a step on a busy host.  All the time from the first bucket's
    start to the last gradient counts as hidden, even if no bucket was on its way for a while.  On
    a GPU a hook records events on the streams, without waiting for them.

    Args:
        ddp: has no hook and has made no step.
        timer: gets the times.
        hook: sends a bucket of gradients; None: DDP itself does.
        state: the hook's first argument.

    Returns:
        What reports the communication in a backward pass that has just ended.
    """
    observe_buffers(ddp, timer)
    is_timed = not isinstance(timer, NullTimer)
    if is_timed and (ddp.device_type == "cuda" or not times_ddp.works):
        return _observe_events(ddp, timer, hook or allreduce_hook, state)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    return _observe_timers(ddp, timer) if is_timed else lambda: None


def observe_buffers(ddp: DistributedDataParallel, timer: Timer) -> None:
    """Count DDP's broadcast of buffers, before it calls the model, as exposed communication.

    The hook on the model removes itself, so that the trained model has none.
    """
    model = ddp.module

    def before(*_: object) -> None:
        if ddp.will_sync_module_buffers():
            timer.begin("communication")
            handle: RemovableHandle = model.register_forward_pre_hook(lambda *_: after(handle))

    def after(handle: RemovableHandle) -> None:
        handle.remove()
        timer.begin("forward")

    if not isinstance(timer, NullTimer) and next(model.buffers(), None) is not None:
        ddp.register_forward_pre_hook(before)


def _observe_timers(ddp: DistributedDataParallel, timer: Timer) -> Callable[[], None]:
    timers = DdpTimers(ddp)

    def report() -> None:
        """Count the end of the backward pass as communication, and the hidden time before it."""
        total, overlap = timers.read()
        hidden = min(max(0.0, overlap), total)  # below 0 where it began after the last gradient
        exposed = total - hidden
        began = timer.moment(seconds_ago=exposed)
        timer.hide(timer.moment(seconds_ago=exposed + hidden), began)
        timer.begin("communication", at=began)

    return report


def _observe_events(
    ddp: DistributedDataParallel, timer: Timer, hook: CommHook, state: object
) -> Callable[[], None]:
    begun: list[Moment] = []
    ended: list[Moment] = []

    def timed(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        begun.append(timer.moment())
        return hook(state, bucket).then(record_end)

    def record_end(sent: torch.futures.Future[Tensor]) -> Tensor:
        ended.append(timer.moment())  # torch runs this on a stream behind the message
        return sent.value()

    def report() -> None:
        """Count all from the last bucket's start as exposed; the other buckets are hidden."""
        for pair in list(zip(begun, ended, strict=False))[:-1]:
            timer.hide(*pair)
        if begun:
            timer.begin("communication", at=begun[-1])
        begun.clear()
        ended.clear()

    ddp.register_comm_hook(state, timed)
    return report


def _bf16(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Call torch's hook; under its own name DDP refuses it on gloo, which can add bfloat16."""
    return bf16_compress_hook(state, bucket)


def _refuse_without_bf16(device: torch.device) -> None:
    try:
        dist.all_reduce(torch.zeros(1, dtype=torch.bfloat16, device=device))
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"{dist.get_backend()} cannot add bfloat16 here; take ddp:hook=fp16 instead."
        ) from error


def _check_matrices(replica: Replica) -> None:
    """Refuse what PowerSGD cannot send.

    Raises:
        UserError: a parameter has no rows, or there are several types on CPUs.
    """
    for name, parameter in replica.model.named_parameters():
        if parameter.requires_grad and (parameter.ndim == 0 or parameter.numel() == 0):
            raise UserError(
                f"ddp:hook=powersgd makes matrices of gradients, and {name}, of shape "
                f"{tuple(parameter.shape)}, has no rows: give it one, e.g. the shape (1,), "
                "or leave the hook out."
            )
    types = {parameter.dtype for parameter in replica.parameters}
    if replica.device.type == "cpu" and len(types) > 1:
        raise UserError(
            "ddp:hook=powersgd sends one bucket on CPUs, and torch makes one for each "
            "floating-point type: give the model one type, or leave the hook out."
        )
