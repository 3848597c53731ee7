"""How much of DDP's communication hides behind its backward pass?  (Every rank.)

Buckets of gradients are sent while earlier layers' gradients are still computed; when
the last has been computed, the rest of the sending is exposed: the backward pass waits
for it.

On a CPU DDP's own timers tell both, read after each backward pass: some 50 us a step, where
a hook in Python costs up to a twentieth of a step on a busy host.  They count as hidden
all the time from the first bucket's start to the last gradient, also where no bucket was
on its way for a while.  On a GPU a hook records events on the streams, which nobody
waits for.

Before a forward pass DDP sends the model's buffers, BatchNorm's statistics: all of it exposed.
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
"""Sends one bucket of gradients, and returns what it becomes."""


class Overlap(ABC):
    """Tells a timer what part of a backward pass was communication."""

    @abstractmethod
    def tell(self) -> None:
        """Tell of the backward pass that has just ended."""


def observe(
    ddp: DistributedDataParallel, timer: Timer, hook: CommHook | None = None, state: object = None
) -> Overlap:
    """Have gradients sent by a hook, and their communication reported to the timer.

    Args:
        ddp: that has made no step yet, and has no hook.
        timer: whom to tell.
        hook: what sends a bucket of gradients; None: DDP as it is.
        state: what the hook is called with.
    """
    observe_buffers(ddp, timer)
    is_timed = not isinstance(timer, NullTimer)
    if is_timed and (ddp.device_type == "cuda" or not times_ddp.works):
        return _ByEvents(ddp, timer, hook or allreduce_hook, state)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    return _ByTimers(ddp, timer) if is_timed else Unobserved()


def observe_buffers(ddp: DistributedDataParallel, timer: Timer) -> None:
    """Have what DDP does about buffers, before it calls the model, counted as communication.

    The hook on the model goes when it is called: the trained model has none of it.
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
class Unobserved(Overlap):
    """For whom nobody listens to, or who tells by itself."""

    def tell(self) -> None:
        """Tell nothing."""


@final
class _ByTimers(Overlap):
    """Reads what DDP measures itself."""

    def __init__(self, ddp: DistributedDataParallel, timer: Timer) -> None:
        self._timers = DdpTimers(ddp)
        self._timer = timer

    def tell(self) -> None:
        """Count the end of the backward pass as communication, and what hid before it."""
        total, hidden = self._timers.read()
        exposed = max(0.0, total - hidden)
        began = self._timer.moment(seconds_ago=exposed)
        self._timer.hide(self._timer.moment(seconds_ago=exposed + hidden), began)
        self._timer.begin("communication", at=began)


@final
class _ByEvents(Overlap):
    """Notes when each bucket's flight begins and ends, on the streams of a GPU."""

    def __init__(
        self, ddp: DistributedDataParallel, timer: Timer, hook: CommHook, state: object
    ) -> None:
        self._timer = timer
        self._begun: list[Moment] = []
        self._ended: list[Moment] = []

        def timed(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            self._begun.append(timer.moment())
            return hook(state, bucket).then(self._note_end)

        ddp.register_comm_hook(state, timed)

    def tell(self) -> None:
        """Count what follows the last bucket's start; the flights of all others are hidden."""
        for begun, ended in list(zip(self._begun, self._ended, strict=False))[:-1]:
            self._timer.hide(begun, ended)
        if self._begun:
            self._timer.begin("communication", at=self._begun[-1])
        self._begun, self._ended = [], []

    def _note_end(self, sent: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        self._ended.append(self._timer.moment())  # torch runs this on a stream behind the flight
        return sent.value()
