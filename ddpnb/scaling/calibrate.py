"""What must a workload and a link be like, for the model to give what was measured?  (Kernel.)"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddpnb.protocol.devices import FORWARD_SHARE, Devices
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import LinkSpec
from ddpnb.scaling.model import Cost, Machine, Workload, cost, step_seconds
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The model's constants, from one comparison; ``sees_fixed`` is of a measured one."""

    measured: Measured
    work: Workload
    here: Machine
    """The machine as it is, or as it is emulated."""
    knows_link: bool
    """Whether an exchange was measured."""
    sees_fixed: bool
    """Whether batches of several sizes show what a step costs however small it is."""


def calibrate(measured: Measured, latency: float = GLOO_LATENCY_SECONDS) -> Calibration:
    """Fit the model; of emulated devices, take what their clocks are made of.

    1. *Computing.*  ``single`` takes fixed + per_sample b, ``no-comm`` the same times a factor k.
       The ratio of the two is fitted to the median steps of each size, k and the level to the
       rates.
    2. *Exchanges.*  At most half of what ``ddp`` takes beyond ``no-comm`` is waiting for
       stragglers.  The rest is the bytes a second of the link; on cores, which do both, nothing is
       hidden.
    3. *Other strategies* that were trained have a factor on what they take beyond ``no-comm``; on
       emulated devices ``fsdp`` alone, whose layers the model does not know.
    """
    if measured.devices is not None:
        work, here = _stated(measured, measured.devices)
        knows_link = sees_fixed = True
    else:
        work, here, sees_fixed = _fitted(measured, latency)
        knows_link = "ddp" in measured.rates and measured.num_ranks > 1
    factors = {
        name: factor
        for name in measured.rates
        if _has_factor(name, measured)
        and (factor := _factor(name, work, here, measured)) is not None
    }
    return Calibration(
        measured=measured,
        work=replace(work, factors=factors),
        here=here,
        knows_link=knows_link,
        sees_fixed=sees_fixed,
    )


def seconds_of(measured: Measured, strategy: str) -> float:
    """Return a measured step of one rank."""
    trained = 1 if strategy == "single" else measured.num_ranks
    batch = measured.batch_size * (trained if measured.is_weak else 1)
    return batch / measured.rates[strategy]


def _stated(measured: Measured, devices: Devices) -> tuple[Workload, Machine]:
    """Return what the clocks of emulated devices are made of."""
    assert devices.compute is not None, "it is measured before anything trains"
    mean = 1 + measured.jitter / 2
    per_pass, per_sample = devices.compute.seconds_per_pass, devices.compute.seconds_per_sample
    cost = Cost(mean * measured.num_passes * per_pass, mean * per_sample)
    work = Workload(
        alone=cost,
        together=cost,
        batch_size=measured.batch_size,
        is_weak=measured.is_weak,
        batches=tuple((each.num_samples, each.num_steps) for each in measured.alone),
        num_bytes=devices.num_gradient_bytes or measured.num_bytes,
        num_trained_bytes=measured.num_bytes,
        backward_share=(1 - FORWARD_SHARE) / measured.num_passes,  # the last one sends
        variation=measured.jitter / math.sqrt(12) / mean,  # drawn evenly from 0 to jitter
        wrapper_seconds=devices.wrapper_seconds,
        replica_seconds=devices.seconds_per_replica,
    )
    here = Machine(
        link=devices.host_link,
        inside=devices.device_link,
        ranks_per_host=devices.num_per_host,
        is_crowded=False,
    )
    return work, here


def _fitted(measured: Measured, latency: float) -> tuple[Workload, Machine, bool]:
    """Return the model that gives what was measured, and whether sizes have shown fixed costs."""
    ratio, sees_fixed = _fixed_over_per_sample(measured)
    alone = _level(ratio, measured, "single", measured.alone, 1)
    together = _level(ratio, measured, "no-comm", measured.together, measured.num_ranks)
    work = Workload(
        alone=alone,
        together=together,
        num_together=measured.num_ranks,
        batch_size=measured.batch_size,
        is_weak=measured.is_weak,
        batches=tuple((each.num_samples, each.num_steps) for each in measured.alone),
        num_bytes=measured.num_bytes,
        backward_share=measured.backward_share,
        optimizer_seconds=min(measured.optimizer_seconds, alone.fixed),
        variation=measured.variation,
        overlaps=not measured.shares_cores,
    )
    cores = float(measured.cores) if measured.shares_cores else math.inf
    here = Machine(link=FREE, cores_per_host=cores, is_link_of_cores=measured.shares_cores)
    if "ddp" in measured.rates and measured.num_ranks > 1:
        work, here = _with_link(work, here, measured, latency)
    return work, here, sees_fixed


def _fixed_over_per_sample(measured: Measured) -> tuple[float, bool]:
    """Return the ratio of a step's fixed cost and a sample's, and whether sizes have shown it."""
    groups = [g for g in (measured.alone, measured.together) if _has_sizes(g)]
    if not groups:
        whole = seconds_of(measured, "single")
        fixed = min(measured.optimizer_seconds, 0.5 * whole)
        return measured.batch_size * fixed / (whole - fixed), False
    largest = max(each.num_samples for group in groups for each in group)
    ratios = np.concatenate([[0.0], largest * np.geomspace(1e-3, MOST_FIXED, 600)])

    def spread(ratio: float) -> float:
        """Return how much the sizes of a group disagree on the cost of a sample."""
        total = 0.0
        for group in groups:
            logs = np.array([math.log(g.seconds / (ratio + g.num_samples)) for g in group])
            weights = np.array([g.num_steps for g in group], dtype=float)
            total += float(np.sum(weights * (logs - np.average(logs, weights=weights)) ** 2))
        return total

    return float(min(ratios, key=spread)), True


def _has_sizes(group: tuple[SizeClass, ...]) -> bool:
    sizes = [each.num_samples for each in group]
    return len(sizes) > 1 and max(sizes) >= 1.2 * min(sizes)


def _level(
    ratio: float, measured: Measured, strategy: str, group: tuple[SizeClass, ...], num_ranks: int
) -> Cost:
    """Return the cost with this ratio that gives the measured rate.

    Where ranks share cores, a rank's own work is the cores' share of the time of a step.
    """
    steps = sum(each.num_steps for each in group)
    samples = sum(each.num_samples * each.num_steps for each in group) / steps
    seconds = num_ranks * samples / measured.rates[strategy]
    if measured.shares_cores:
        seconds /= max(1.0, num_ranks / measured.cores)
    per_sample = seconds / (ratio + samples)
    return Cost(ratio * per_sample, per_sample)


def _with_link(
    work: Workload, here: Machine, measured: Measured, latency: float
) -> tuple[Workload, Machine]:
    num = measured.num_ranks
    wanted = seconds_of(measured, "ddp")
    work = _with_waiting(work, here, num, wanted)
    left = wanted - step_seconds("ddp", work, here, num)
    if left <= 0:
        return work, here
    busy = max(1.0, num / here.cores_per_host)
    latency = min(latency, 0.25 * left / (num - 1)) / busy

    def over(seconds: float) -> Machine:
        """Return the machine if an all-reduce of everything takes so long, latencies apart."""
        moved = 2 * (num - 1) / num * work.num_bytes
        rate = 8 * moved / seconds * busy
        return replace(here, link=LinkSpec(bits_per_second=rate, latency_seconds=latency))

    seconds = _closest(
        lambda seconds: step_seconds("ddp", work, over(seconds), num),
        left * np.geomspace(0.1, 300.0, 1601),
        wanted,
    )
    return work, over(seconds)


def _with_waiting(work: Workload, here: Machine, num_ranks: int, wanted: float) -> Workload:
    """Let ranks vary so little that waiting is half of what ``ddp`` takes beyond ``no-comm``."""
    without = step_seconds("no-comm", work, here, num_ranks)
    own = cost(work, here, num_ranks).of(work.samples(num_ranks))
    most = max(0.0, wanted - without) / 2 / (own * expected_max(num_ranks))
    return replace(work, variation=min(work.variation, most))


def _closest(
    seconds_at: Callable[[float], float], values: NDArray[np.float64], wanted: float
) -> float:
    """Return the value at which a function comes closest to what is wanted."""
    return float(min(values.tolist(), key=lambda value: abs(seconds_at(value) - wanted)))


def _has_factor(name: str, measured: Measured) -> bool:
    if measured.devices is not None:
        return name.startswith("fsdp")
    return name not in ("single", "no-comm", "ddp")


def _factor(name: str, work: Workload, here: Machine, measured: Measured) -> float | None:
    """Return measured over modelled, of what a strategy takes beyond ``no-comm``."""
    num = measured.num_ranks
    try:
        modelled = step_seconds(name, work, here, num)
    except UserError:  # it cannot be predicted
        return None
    without = step_seconds("no-comm", work, here, num)
    if modelled - without < 1e-3 * without:
        return None
    return max(0.0, (seconds_of(measured, name) - without) / (modelled - without))
