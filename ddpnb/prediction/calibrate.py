"""Fits the model to a comparison, or uses the settings of emulated devices.  Runs in the kernel."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ddpnb.prediction.model import Machine, Workload, cost, step_seconds
from ddpnb.prediction.waiting import expected_max
from ddpnb.protocol.devices import Compute, Devices
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import LinkSpec

GLOO_LATENCY_SECONDS = 30e-6
"""The assumed latency of a message between two processes of a host."""
MOST_FIXED = 50.0
"""Maximum fixed cost of a step, divided by the cost of the samples in the largest batch."""
FREE = LinkSpec(bits_per_second=1e15, latency_seconds=0.0)
"""A link that is so fast that exchanges take hardly any time."""


class SizeClass(NamedTuple):
    """The steps with the same number of samples."""

    num_samples: int
    """Number of samples of one rank in a step."""
    seconds: float
    """Median seconds of a step."""
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The numbers of a stored comparison that the model needs."""

    name: str
    """Name of the comparison, such as ``digits-3``."""
    batch_size: int
    """Size of the global batch; if ``is_weak``, size of each rank's batch."""
    is_weak: bool
    num_ranks: int
    num_bytes: float
    alone: tuple[SizeClass, ...]
    """The steps of ``single``."""
    together: tuple[SizeClass, ...]
    """The steps of each rank of ``no-comm``."""
    rates: Mapping[str, float]
    """Samples/s by strategy, including ``single`` and ``no-comm``."""
    backward_share: float
    optimizer_seconds: float
    variation: float
    device: str
    """``"cpu"``, or the type of a GPU such as ``"cuda"``."""
    cores: float
    """Number of cores of the machine that trained."""
    devices: Devices | None = None
    """Emulated devices, from which the model takes its constants; None if times were measured."""
    jitter: float = 0.0
    """Jitter of emulated devices; see ``ComputeTimes``."""
    num_passes: int = 1
    """Number of micro-batches in a step."""
    short: tuple[str, ...] = ()
    """Strategies that trained too briefly for reliable rates."""
    place: str = "this machine"
    """The machine that trained: ``"this machine"`` or ``"host b"``."""

    @property
    def shares_cores(self) -> bool:
        """True if the ranks compute on one CPU.  More ranks would share the same cores."""
        return self.device == "cpu" and self.devices is None

    @property
    def has_exchange(self) -> bool:
        """True if the comparison shows the cost of an exchange."""
        return self.devices is not None or ("ddp" in self.rates and self.num_ranks > 1)

    @property
    def sized(self) -> list[tuple[SizeClass, ...]]:
        """The groups that have steps of different sizes.  Such groups show a step's fixed cost."""
        return [
            group
            for group in (self.alone, self.together)
            if max(group).num_samples >= 1.2 * min(group).num_samples
        ]

    def seconds_of(self, strategy: str) -> float:
        """Return the seconds of one rank's step."""
        trained = 1 if strategy == "single" else self.num_ranks
        return self.batch_size * (trained if self.is_weak else 1) / self.rates[strategy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The constants of the model for one comparison."""

    measured: Measured
    work: Workload
    here: Machine
    """The machine that trained the comparison, real or emulated."""


def calibrate(measured: Measured) -> Calibration:
    """Fit the model to measured times.  For emulated devices, use their clocks' settings instead.

    ``docs/prediction-error.md`` explains the three steps: computing, exchanges, other strategies.
    """
    if measured.devices is not None:
        work, here = _stated(measured, measured.devices)
    else:
        work, here = _fitted(measured)
    factors = {name: _factor(name, work, here, measured) for name in measured.rates}
    known = {name: factor for name, factor in factors.items() if factor is not None}
    return Calibration(measured=measured, work=replace(work, factors=known), here=here)


def _stated(measured: Measured, devices: Devices) -> tuple[Workload, Machine]:
    """Return the workload and the machine with the settings of the emulated devices' clocks."""
    assert devices.compute is not None, "compute is measured before the first training"
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
        variation=measured.jitter / math.sqrt(12) / mean,  # drawn uniformly from 0 to jitter
        wrapper_seconds=devices.wrapper_seconds,
        replica_seconds=devices.seconds_per_replica,
    )
    here = Machine(
        link=devices.host_link,
        inside=devices.device_link,
        ranks_per_host=devices.num_per_host,
        backend=devices.backend,
    )
    return work, here


def _fitted(measured: Measured) -> tuple[Workload, Machine]:
    """Return the workload and the machine with which the model reproduces the measured rates."""
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
    cores = measured.cores if measured.shares_cores else math.inf
    backend = "nccl" if measured.device == "cuda" else ""
    here = Machine(
        link=FREE, cores_per_host=cores, is_link_of_cores=measured.shares_cores, backend=backend
    )
    return _with_link(work, here, measured) if measured.has_exchange else (work, here)


def _fixed_over_per_sample(measured: Measured) -> float:
    """Return a step's fixed cost, divided by the cost of one sample."""
    groups = measured.sized
    if not groups:
        whole = measured.seconds_of("single")
        fixed = min(measured.optimizer_seconds, 0.5 * whole)
        return measured.batch_size * fixed / (whole - fixed)
    largest = max(each.num_samples for group in groups for each in group)
    ratios = np.concatenate([[0.0], largest * np.geomspace(1e-3, MOST_FIXED, 600)])

    def spread(ratio: float) -> float:
        """Return how much the cost of a sample differs between the step sizes of the same group."""
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
    """Return the cost of computing that reproduces the measured rate of a strategy.

    If N ranks share C cores and C < N, a rank computes during only C / N of a step.
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
    """Limit the workload's variation, and give the machine a link that fits ``ddp``'s time."""
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
        """Return the machine with a link that needs ``seconds``, plus latencies, for all bytes."""
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
    """Return measured / modelled seconds after subtracting ``no-comm``'s seconds; None means 1."""
    is_fitted = measured.devices is None or name.startswith(("fsdp", "zero"))
    if name in ("single", "no-comm", "ddp") or not is_fitted:
        return None
    num = measured.num_ranks
    try:
        modelled = step_seconds(name, work, here, num)
    except UserError:  # the strategy cannot be predicted
        return None
    without = step_seconds("no-comm", work, here, num)
    if modelled - without < 1e-3 * without:
        return None
    return max(0.0, (measured.seconds_of(name) - without) / (modelled - without))
