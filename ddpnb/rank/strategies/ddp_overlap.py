"""How much of DDP's communication hides behind its backward pass (every rank).

Buckets of gradients are sent while earlier layers' gradients are still computed.  Once the last
gradient is there, the rest of the communication is exposed: the backward pass waits for it.

On a CPU, DDP's own timers are read after each backward pass, at some 50 us a step; a hook in
Python costs up to a twentieth of a step on a busy host.  All the time from the first bucket's
start to the last gradient counts as hidden, even if no bucket was on its way for a while.  On a
GPU a hook records events on the streams, without waiting for them.

Before a forward pass DDP sends the model's buffers, such as BatchNorm's statistics: all of that
is exposed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

import torch
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddpnb.compat.torch_internals import DdpTimers, times_ddp
from ddpnb.rank.strategies.timer import Moment, NullTimer, Timer

CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
"""Sends one bucket of gradients, and returns the future of the averaged one."""


class Overlap(ABC):
    """Reports the communication in each backward pass to a timer."""

    @abstractmethod
    def report(self) -> None:
        """Report the backward pass that has just ended."""


@final
class NullOverlap(Overlap):
    """An overlap that reports nothing."""

    def report(self) -> None:
        """Report nothing."""


def observe(
    ddp: DistributedDataParallel, timer: Timer, hook: CommHook | None = None, state: object = None
) -> Overlap:
    """Send gradients by a hook, and time their communication.

    Args:
        ddp: has no hook and has made no step.
        timer: gets the times.
        hook: sends a bucket of gradients; None: DDP itself does.
        state: the hook's first argument.
    """
    observe_buffers(ddp, timer)
    is_timed = not isinstance(timer, NullTimer)
    if is_timed and (ddp.device_type == "cuda" or not times_ddp.works):
        return _EventOverlap(ddp, timer, hook or allreduce_hook, state)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    return _TimerOverlap(ddp, timer) if is_timed else NullOverlap()


def observe_buffers(ddp: DistributedDataParallel, timer: Timer) -> None:
    """Count DDP's broadcast of buffers, before it calls the model, as communication.

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


@final
class _TimerOverlap(Overlap):
    """Reads DDP's own timers."""

    def __init__(self, ddp: DistributedDataParallel, timer: Timer) -> None:
        self._timers = DdpTimers(ddp)
        self._timer = timer

    def report(self) -> None:
        """Count the end of the backward pass as communication, and the hidden time before it."""
        total, hidden = self._timers.read()
        exposed = max(0.0, total - hidden)
        began = self._timer.moment(seconds_ago=exposed)
        self._timer.hide(self._timer.moment(seconds_ago=exposed + hidden), began)
        self._timer.begin("communication", at=began)


@final
class _EventOverlap(Overlap):
    """Records when each bucket's communication begins and ends, on the streams of a GPU."""

    def __init__(
        self, ddp: DistributedDataParallel, timer: Timer, hook: CommHook, state: object
    ) -> None:
        self._timer = timer
        self._begun: list[Moment] = []
        self._ended: list[Moment] = []

        def timed(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            self._begun.append(timer.moment())
            return hook(state, bucket).then(self._record_end)

        ddp.register_comm_hook(state, timed)

    def report(self) -> None:
        """Count all from the last bucket's start as exposed; the other buckets are hidden."""
        for begun, ended in list(zip(self._begun, self._ended, strict=False))[:-1]:
            self._timer.hide(begun, ended)
        if self._begun:
            self._timer.begin("communication", at=self._begun[-1])
        self._begun, self._ended = [], []

    def _record_end(self, sent: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        self._ended.append(self._timer.moment())  # torch runs this on a stream behind the message
        return sent.value()
