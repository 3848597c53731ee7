"""Emulated devices: every gradient is real, every second is computed (ranks)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from torch import nn

from ddpnb.protocol.devices import Devices
from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.laboratory.order import VirtualOrder
from ddpnb.rank.laboratory.times import ComputeTimes


@final
@dataclass(frozen=True, kw_only=True)
class Laboratory:
    """The emulated devices of one run, which train one model."""

    devices: Devices
    times: ComputeTimes
    num_bytes: int
    """Of the gradients of the model that is trained."""
    num_in_shard: Callable[[Any], int]
    """Returns the samples of a shard."""

    @classmethod
    def of(
        cls,
        devices: Devices,
        *,
        model: nn.Module,
        num_in_shard: Callable[[Any], int] = lambda _: 0,
        **varied: Any,
    ) -> "Laboratory":
        """Return devices whose computing is known; ``varied`` are further ``ComputeTimes``."""
        size = num_bytes(each for each in model.parameters() if each.requires_grad)
        assert devices.compute is not None, "it is measured before anything trains"
        times = ComputeTimes(
            compute=devices.compute,
            seconds_per_replica=devices.seconds_per_replica,
            wrapper_seconds=devices.wrapper_seconds,
            **varied,
        )
        return cls(devices=devices, times=times, num_bytes=size, num_in_shard=num_in_shard)

    @cached_property
    def scale(self) -> float:
        """Bytes of the emulated model for each byte of the one that is trained."""
        return (self.devices.num_gradient_bytes or self.num_bytes) / max(self.num_bytes, 1)

    def order(self, num_workers: int, shard: Callable[[int], Any]) -> VirtualOrder:
        """Return the order in which a server of rank 0 handles the workers' requests.

        ``shard`` returns that of a number in the queue.
        """
        return VirtualOrder(
            self.times,
            num_workers=num_workers,
            link=self.devices.link_between,
            num_bytes=self.scale * self.num_bytes,
            num_samples=lambda number: self.num_in_shard(shard(number)),
        )
