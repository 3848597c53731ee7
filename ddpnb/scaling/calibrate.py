"""Fits the model to a comparison; of emulated devices, takes their figures.  (Kernel.)"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ddpnb.protocol.devices import Compute, Devices
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import LinkSpec
from ddpnb.scaling.model import Machine, Workload, cost, step_seconds
from ddpnb.scaling.waiting import expected_max

GLOO_LATENCY_SECONDS = 30e-6
"""Of one message between processes of a host, where it was not measured."""
MOST_FIXED = 50.0
"""The most that a step's fixed cost can be, in costs of the largest batch."""
FREE = LinkSpec(bits_per_second=1e15, latency_seconds=0.0)
"""Exchanges that cost nothing that could be measured."""


class SizeClass(NamedTuple):
    """Steps of one number of samples."""

    num_samples: int
    """Of one rank."""
    seconds: float
    """Median of a step."""
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A stored comparison, as far as the model needs it."""

    name: str
    """Such as ``digits-3``."""
    batch_size: int
    """Global; with ``is_weak`` of each rank."""
    is_weak: bool
    num_ranks: int
    num_bytes: float
    alone: tuple[SizeClass, ...]
    """The steps of ``single``."""
    together: tuple[SizeClass, ...]
    """Of ``no-comm``: of each rank."""
    rates: Mapping[str, float]
    """Samples/s by strategy; ``single`` and ``no-comm`` among them."""
    backward_share: float
    optimizer_seconds: float
    variation: float
    device: str
    """``"cpu"``, or that of a GPU."""
    cores: int
    """Of the machine that measured it."""
    devices: Devices | None = None
    """Emulated ones, whose figures are the model's; None: the time was measured."""
    jitter: float = 0.0
    """Of emulated devices; see ``ComputeTimes``."""
    num_passes: int = 1
    """Micro-batches of a step."""
    short: tuple[str, ...] = ()
    """Strategies that were trained too briefly for their rates to be certain."""

    @property
    def shares_cores(self) -> bool:
        """Whether ranks compute on cores that they share where there are more ranks."""
        return self.device == "cpu" and self.devices is None

    @property
    def has_exchange(self) -> bool:
        """Whether it shows what an exchange costs."""
        return self.devices is not None or ("ddp" in self.rates and self.num_ranks > 1)

    @property
    def sized(self) -> list[tuple[SizeClass, ...]]:
        """Steps of several sizes, which show what a step costs however small it is."""
        return [
            group
            for group in (self.alone, self.together)
            if max(group).num_samples >= 1.2 * min(group).num_samples
        ]

    def seconds_of(self, strategy: str) -> float:
        """Return a step of one rank."""
        trained = 1 if strategy == "single" else self.num_ranks
        return self.batch_size * (trained if self.is_weak else 1) / self.rates[strategy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The model's constants, from one comparison."""

    measured: Measured
    work: Workload
    here: Machine
    """The machine as it is, or as it is emulated."""


def calibrate(measured: Measured) -> Calibration:
    """Fit the model; of emulated devices, take what their clocks are made of.

    ``docs/prediction-error.md`` has the three steps: computing, exchanges, other strategies.
    """
    if measured.devices is not None:
        work, here = _stated(measured, measured.devices)
    else:
        work, here = _fitted(measured)
    factors = {name: _factor(name, work, here, measured) for name in measured.rates}
    known = {name: factor for name, factor in factors.items() if factor is not None}
    return Calibration(measured=measured, work=replace(work, factors=known), here=here)


def _stated(measured: Measured, devices: Devices) -> tuple[Workload, Machine]:
    """Return what the clocks of emulated devices are made of."""
    assert devices.compute is not None, "it is measured before anything trains"
    mean = 1 + measured.jitter / 2
    per_sample, per_pass = devices.compute
    alone = Compute(mean * per_sample, mean * measured.num_passes * per_pass)
    work = Workload(
        alone=alone,
        together=alone,
        batch_size=measured.batch_size,
        is_weak=measured.is_weak,
        batches=tuple((each.num_samples, each.num_steps) for each in measured.alone),
        num_bytes=devices.num_gradient_bytes or measured.num_bytes,
        num_trained_bytes=measured.num_bytes,
        num_passes=measured.num_passes,
        variation=measured.jitter / math.sqrt(12) / mean,  # drawn evenly from 0 to jitter
        wrapper_seconds=devices.wrapper_seconds,
        replica_seconds=devices.seconds_per_replica,
    )
    here = Machine(
        link=devices.host_link, inside=devices.device_link, ranks_per_host=devices.num_per_host
    )
    return work, here


def _fitted(measured: Measured) -> tuple[Workload, Machine]:
    """Return the model that gives what was measured."""
    alone = _level(measured, "single", measured.alone, 1)
    work = Workload(
        alone=alone,
        together=_level(measured, "no-comm", measured.together, measured.num_ranks),
        num_together=measured.num_ranks,
        batch_size=measured.batch_size,
        is_weak=measured.is_weak,
        batches=tuple((each.num_samples, each.num_steps) for each in measured.alone),
        num_bytes=measured.num_bytes,
        backward_share=measured.backward_share,
        num_passes=measured.num_passes,
        optimizer_seconds=min(measured.optimizer_seconds, alone.fixed),
        variation=measured.variation,
        overlaps=not measured.shares_cores,
    )
    cores = float(measured.cores) if measured.shares_cores else math.inf
    here = Machine(link=FREE, cores_per_host=cores, is_link_of_cores=measured.shares_cores)
    return _with_link(work, here, measured) if measured.has_exchange else (work, here)


def _fixed_over_per_sample(measured: Measured) -> float:
    """Return the ratio of a step's fixed cost and a sample's."""
    groups = measured.sized
    if not groups:
        whole = measured.seconds_of("single")
        fixed = min(measured.optimizer_seconds, 0.5 * whole)
        return measured.batch_size * fixed / (whole - fixed)
    largest = max(each.num_samples for group in groups for each in group)
    ratios = np.concatenate([[0.0], largest * np.geomspace(1e-3, MOST_FIXED, 600)])

    def spread(ratio: float) -> float:
        """Return how much the sizes of a group disagree on the cost of a sample."""
        total = 0.0
        for group in groups:
            logs = [math.log(g.seconds / (ratio + g.num_samples)) for g in group]
            all_logs = np.repeat(logs, [g.num_steps for g in group])
            total += len(all_logs) * float(np.var(all_logs))
        return total

    return float(min(ratios, key=spread))


def _level(
    measured: Measured, strategy: str, group: Sequence[SizeClass], num_ranks: int
) -> Compute:
    """Return the cost that gives the measured rate.

    Where ranks share cores, a rank's own work is the cores' share of the time of a step.
    """
    steps = sum(each.num_steps for each in group)
    samples = sum(each.num_samples * each.num_steps for each in group) / steps
    seconds = num_ranks * samples / measured.rates[strategy]
    if measured.shares_cores:
        seconds /= max(1.0, num_ranks / measured.cores)
    ratio = _fixed_over_per_sample(measured)
    per_sample = seconds / (ratio + samples)
    return Compute(per_sample, ratio * per_sample)


def _with_link(work: Workload, here: Machine, measured: Measured) -> tuple[Workload, Machine]:
    """Return the link that gives the rate of ``ddp``, and ranks that vary as much as they may."""
    num, wanted = measured.num_ranks, measured.seconds_of("ddp")
    own = cost(work, here, num).of(work.samples(num))
    most = (wanted - step_seconds("no-comm", work, here, num)) / 2 / (own * expected_max(num))
    work = replace(work, variation=min(work.variation, max(0.0, most)))
    left = wanted - step_seconds("ddp", work, here, num)
    if left <= 0:
        return work, here
    busy = max(1.0, num / here.cores_per_host)
    latency = min(GLOO_LATENCY_SECONDS, 0.25 * left / (num - 1)) / busy

    def over(seconds: float) -> Machine:
        """Return the machine if an all-reduce of everything takes so long, latencies apart."""
        moved = 2 * (num - 1) / num * work.num_bytes
        rate = 8 * moved / seconds * busy
        return replace(here, link=LinkSpec(bits_per_second=rate, latency_seconds=latency))

    low, high = 0.1 * left, 300.0 * left
    for _ in range(40):
        middle = math.sqrt(low * high)
        is_slow = step_seconds("ddp", work, over(middle), num) > wanted
        low, high = (low, middle) if is_slow else (middle, high)
    return work, over(high)


def _factor(name: str, work: Workload, here: Machine, measured: Measured) -> float | None:
    """Return measured over modelled, of what a strategy takes beyond ``no-comm``; None: 1."""
    is_fitted = measured.devices is None or name.startswith(("fsdp", "zero"))
    if name in ("single", "no-comm", "ddp") or not is_fitted:
        return None
    num = measured.num_ranks
    try:
        modelled = step_seconds(name, work, here, num)
    except UserError:  # it cannot be predicted
        return None
    without = step_seconds("no-comm", work, here, num)
    if modelled - without < 1e-3 * without:
        return None
    return max(0.0, (measured.seconds_of(name) - without) / (modelled - without))
