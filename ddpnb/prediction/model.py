"""Computes the seconds of a step of each strategy on N ranks.  Runs in the kernel.

A step consists of a rank's computing, its waiting, and the exposed part of its exchanges:

    compute    c(b) = fixed + per_sample * b for b samples of a rank; ranks take turns on cores
    exchanges  the exchanges of each strategy, with the messages of ``protocol.costs``
    waiting    for the slowest of N ranks: c * variation * expected_max(N)

docs/prediction-error.md has every formula with its source.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ddpnb.prediction.waiting import expected_max, on_cores, server_bound
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.costs import (
    BEST,
    BUCKET_BYTES,
    DOUBLE_TREE,
    Ready,
    algorithm_of,
    in_turn,
    num_buckets,
)
from ddpnb.protocol.devices import FORWARD_SHARE, Compute
from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.notation import Choice, LinkSpec, parse_strategy, slower_of

MEGABYTE = 2**20
FIRST_BUCKET_BYTES = 2**20
"""Size of DDP's first bucket.  The bucket is small, so that DDP soon uses the link."""
NO_GAIN = 1.1
"""Scaling stops if doubling the ranks multiplies the throughput by less than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The costs of training a model, measured on one rank and on several ranks."""

    alone: Compute
    """Cost of a step if only one rank computes."""
    together: Compute
    """Cost of each rank's step if ``num_together`` ranks compute at once and do not communicate."""
    num_together: int = 1
    batch_size: float
    """Size of the global batch; if ``is_weak``, size of each rank's batch."""
    is_weak: bool = False
    batches: tuple[tuple[int, int], ...] = ()
    """Pairs of a global batch's size and the number of such batches.  If empty, or if ``is_weak``,
    all batches are full."""
    num_bytes: float
    """Size of the gradients in bytes, equal to the size of the parameters."""
    num_trained_bytes: float | None = None
    """Bytes of the trained model's gradients, if it imitates a published model; otherwise None."""
    backward_share: float = 1 - FORWARD_SHARE
    """Time of the backward pass, divided by the time of the forward and backward pass together."""
    num_passes: int = 1
    """Number of micro-batches in a step; only the last backward pass hides exchanges."""
    optimizer_seconds: float = 0.0
    """Seconds of the optimizer after the last exchange.  ``fixed`` includes these seconds."""
    variation: float = 0.0
    """Standard deviation of a rank's computing times in different steps, divided by their mean."""
    overlaps: bool = True
    """True if DDP sends a bucket as soon as the backward pass has filled the bucket."""
    wrapper_seconds: float = 0.0
    """Seconds per step to copy gradients to buffers and back, as DDP does."""
    replica_seconds: float = 0.0
    """Seconds of Python code for each replica of DataParallel in a step."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Maps each strategy to its exchanges' measured seconds, divided by the modelled seconds."""

    def samples(self, num_ranks: int) -> float:
        """Return the number of samples of one rank in a step."""
        return self.batch_size if self.is_weak else self.batch_size / num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hosts on which a model is trained, and their links."""

    link: LinkSpec
    """The link between hosts, or between all ranks if ``inside`` is None."""
    inside: LinkSpec | None = None
    """The link between the ranks of one host."""
    ranks_per_host: float = math.inf
    algorithm: str = "ring"
    """The algorithm of all-reduces.  ``BEST`` means the faster of ring and double tree."""
    backend: str = ""
    """``"nccl"`` if the devices are GPUs, real or emulated."""
    cores_per_host: float = math.inf
    """Number of cores that the ranks of a host share; infinite if each rank has one device."""
    is_link_of_cores: bool = False
    """True if the cores also do the work of a network card, so that exchanges share the cores."""

    def on_host(self, num_ranks: int) -> float:
        """Return the number of ranks on a host."""
        return min(num_ranks, self.ranks_per_host)

    def link_of(self, num_ranks: int) -> LinkSpec:
        """Return the link for exchanges; a ring over several hosts uses the slower link."""
        link = self.link
        if self.inside is not None:
            is_one = num_ranks <= self.ranks_per_host
            link = self.inside if is_one else slower_of(self.inside, link)
        if not self.is_link_of_cores:
            return link
        busy = max(1.0, self.on_host(num_ranks) / self.cores_per_host)
        return LinkSpec(
            bits_per_second=link.bits_per_second / busy,
            latency_seconds=link.latency_seconds * busy,
        )


class Point(NamedTuple):
    """The prediction for a strategy on one number of ranks."""

    num_ranks: int
    step_seconds: float
    samples_per_second: float
    efficiency: float
    """Throughput, divided by N times the throughput of one rank."""


def cost(work: Workload, machine: Machine, num_ranks: int) -> Compute:
    """Return the cost of a step of one rank while N ranks compute at once.

    Ranks that share cores slow each other down.  The slowdown is measured.  It is proportional to
    the number of other ranks that compute at once (at most one per core).  On devices, the slowdown
    is at most the measured slowdown.
    """
    busy = min(machine.on_host(num_ranks), machine.cores_per_host)
    measured = min(work.num_together, machine.cores_per_host)
    if measured <= 1:
        return work.alone
    share = (busy - 1) / (measured - 1)
    most = share if math.isfinite(machine.cores_per_host) else 1.0
    pairs = zip(work.alone, work.together, strict=True)
    return Compute(*(a + min(share, most if b > a else 1.0) * (b - a) for a, b in pairs))


# -- the strategies ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The inputs of a strategy's formula."""

    work: Workload
    machine: Machine
    num_ranks: int
    chosen: Choice
    size: float
    """Number of bytes to send, after compression."""

    def option(self, name: str) -> float:
        """Return the value of the strategy's option, or the option's default."""
        default = STRATEGIES[self.chosen.name].options[name].default
        value = self.chosen.options.get(name, default)
        assert isinstance(value, bool | int | float)
        return float(value)

    def computing(self, *, meets: bool = True) -> float:
        """Return the seconds that a rank computes in a step; if ``meets``, add its waiting time."""
        work, machine, num = self.work, self.machine, self.num_ranks
        samples = math.ceil(work.samples(num)) if meets else work.samples(num)
        own = cost(work, machine, num).of(samples)
        here, cores = machine.on_host(num), machine.cores_per_host
        if not meets:
            return own * max(1.0, here / cores)
        turns = on_cores(own, int(here), cores) if math.isfinite(here) else own
        return turns + own * work.variation * expected_max(num)

    def backward(self, compute: float) -> float:
        """Return the seconds of the last backward pass, which can hide exchanges."""
        passes = compute - min(self.work.optimizer_seconds, compute)
        return self.work.backward_share * passes / self.work.num_passes

    def exchange(self, name: str, num_bytes: float) -> float:
        """Return the seconds of a collective."""
        usual, link = algorithm_of(name, self.machine.backend), self.machine.link_of(self.num_ranks)
        assert usual is not None, "strategies use only known collectives"
        found = [usual]
        if name == "all_reduce" and self.machine.algorithm == BEST:
            found.append(DOUBLE_TREE)
        return min(each.of(num_bytes, self.num_ranks).seconds(link) for each in found)

    def gathering(self) -> float:
        """Return the seconds of an all-gather, in which each rank contributes one part."""
        return self.exchange("all_gather", self.size / self.num_ranks)


def _single(case: Situation) -> float:
    """Return the seconds that one device needs for the whole batch, with any number of ranks."""
    return case.work.alone.of(case.work.samples(1))


def _in_buckets(
    case: Situation, cap: float = BUCKET_BYTES, collective: str = "all_reduce"
) -> float:
    """Return the seconds of a step with buckets, with the rules of emulated devices' clocks."""
    work, compute = case.work, case.computing()
    backward = case.backward(compute)
    trained = work.num_trained_bytes or work.num_bytes
    now = free = 0.0
    for bucket in bucket_sizes(trained, cap):
        share = bucket / trained
        size, begun = share * case.size, now + share * work.wrapper_seconds
        now = begun + share * backward
        end = backward + work.wrapper_seconds
        ready: Ready = (begun, now) if work.overlaps else (end, end)
        number = num_buckets(size, ready) if work.num_trained_bytes else 1
        _, free = in_turn(case.exchange(collective, size / number), number, [ready], free)[-1]
    return compute - backward + max(now, free)


def bucket_sizes(num_bytes: float, cap: float) -> list[float]:
    """Return the sizes of DDP's buckets in bytes: a small first bucket, then at most ``cap``."""
    sizes: list[float] = []
    left = num_bytes
    while left > 0:
        sizes.append(min(cap if sizes else min(FIRST_BUCKET_BYTES, cap), left))
        left -= sizes[-1]
    return sizes


def _after(case: Situation, *names: str) -> float:
    """Return the seconds of a step: computing, then each named collective with all bytes."""
    exchanges = sum(case.exchange(name, case.size) for name in names)
    return case.computing() + case.work.wrapper_seconds + exchanges


def _dp(case: Situation) -> float:
    """Return the seconds of a DataParallel step.  Samples and outputs add only latencies."""
    one_process = replace(case.machine, ranks_per_host=math.inf, backend="nccl")
    case = replace(case, machine=one_process)
    python = case.num_ranks * case.work.replica_seconds
    sent = case.exchange("broadcast", case.size) + case.exchange("reduce", case.size)
    sent += 3 * case.exchange("gather", 0.0)
    return case.computing() + python + sent


def _zero(case: Situation) -> float:
    """Return the seconds of a DDP step plus an all-gather (as slow as ZeRO's broadcasts)."""
    return _in_buckets(case) + case.gathering()


def _fsdp(case: Situation) -> float:
    """Return the seconds of a DDP step plus all gathers before the last backward pass.

    The last gather and the reduce-scatter together cost the same as DDP's all-reduce.  A forward
    pass can hide its gathers, except the gather of the first bucket.  Earlier backward passes can
    hide all their gathers.  With ``reshard=off``, backward passes gather nothing.
    """
    case = replace(case, work=replace(case.work, wrapper_seconds=0.0))  # DDP's own time
    work, gathering = case.work, case.gathering()
    backward = case.backward(case.computing())
    forward = backward * (1 / work.backward_share - 1)
    first = gathering * min(1.0, BUCKET_BYTES / case.size)
    if not work.overlaps:
        first, forward, backward = gathering, 0.0, 0.0
    gathers = work.num_passes * max(first, gathering - forward)
    if not case.option("reshard"):
        return _in_buckets(case, collective="reduce_scatter") + gathers
    gathers += (work.num_passes - 1) * max(0.0, gathering - backward)
    return _in_buckets(case) + gathers


def _rounds(case: Situation) -> float:
    every = case.option("every")
    own, meeting = case.computing(meets=False), case.computing()
    waiting = max(meeting - own, 0.0) / math.sqrt(every)
    exchange = case.work.wrapper_seconds + case.exchange("all_reduce", case.size)
    return own + waiting + exchange / every


def _async(case: Situation) -> float:
    """Return the mean seconds of a step.  Rank 0 has the server and needs no link."""
    compute, link = case.computing(meets=False), case.machine.link_of(case.num_ranks)
    rate = 1 / compute + server_bound(link, case.size, compute, case.num_ranks - 1)
    return case.num_ranks / rate


FORMULAS: Mapping[str, Callable[[Situation], float]] = {
    "single": _single,
    "no-comm": lambda case: case.computing(meets=False),
    "ddp": lambda case: _in_buckets(case, case.option("bucket_cap_mb") * MEGABYTE),
    "ddp-by-hand": lambda case: _after(case, "all_reduce"),
    "ring-by-hand": lambda case: _after(case, "all_reduce"),
    "dp": _dp,
    "central": lambda case: _after(case, "reduce", "broadcast"),
    "zero": _zero,
    "fsdp": _fsdp,
    "local-sgd": _rounds,
    "diloco": _rounds,
    "gossip": lambda case: _after(case, "send"),
    "async": _async,
}
"""Functions that return the seconds of one rank's step, on two or more ranks."""


def formula_of(strategy: str) -> tuple[Choice, Callable[[Situation], float]]:
    """Return the parsed strategy and its formula.

    Raises:
        UserError: the strategy does not exist, or cannot be predicted.
    """
    name = strategy.partition(":")[0]
    if name not in STRATEGIES:
        raise one_of("strategy", name, FORMULAS)
    chosen = parse_strategy(strategy)
    if name not in FORMULAS or (name == "single" and chosen.options):
        raise UserError(f"{strategy} cannot be predicted. Choose from: {', '.join(FORMULAS)}.")
    return chosen, FORMULAS[name]


def step_seconds(strategy: str, work: Workload, machine: Machine, num_ranks: int) -> float:
    """Return the seconds that a strategy needs for a full batch on N ranks.

    If batches differ in size, return the mean over all batches, scaled to a full batch.
    """
    if work.is_weak or not work.batches:
        return _seconds(strategy, work, machine, num_ranks)
    seconds = (
        num * _seconds(strategy, replace(work, batch_size=size), machine, num_ranks)
        for size, num in work.batches
    )
    return sum(seconds) * work.batch_size / sum(size * num for size, num in work.batches)


def _seconds(strategy: str, work: Workload, machine: Machine, num_ranks: int) -> float:
    if num_ranks == 1:
        return work.alone.of(work.samples(1))
    chosen, formula = formula_of(strategy)
    halved = chosen.options.get("hook") in ("fp16", "bf16")
    size = work.num_bytes / 2 if halved else work.num_bytes
    case = Situation(work=work, machine=machine, num_ranks=num_ranks, chosen=chosen, size=size)
    without = case.computing(meets=False)
    return without + work.factors.get(strategy, 1.0) * (formula(case) - without)


def point(strategy: str, work: Workload, machine: Machine, num_ranks: int) -> Point:
    """Return the throughput and the efficiency of a strategy on N ranks."""
    seconds = step_seconds(strategy, work, machine, num_ranks)
    trained = 1 if strategy == "single" else num_ranks
    rate = trained * work.samples(trained) / seconds
    one = work.samples(1) / step_seconds("single", work, machine, 1)
    return Point(num_ranks, seconds, rate, rate / num_ranks / one)


def stops_at(strategy: str, work: Workload, machine: Machine, most: int) -> int | None:
    """Return the number of ranks at which scaling stops; None if it is larger than ``most``."""
    ranks = 1
    while 2 * ranks <= most:
        if work.samples(2 * ranks) < 1:
            return ranks
        now, then = (point(strategy, work, machine, n) for n in (ranks, 2 * ranks))
        if then.samples_per_second < NO_GAIN * now.samples_per_second:
            return ranks
        ranks *= 2
    return None


def limit_of(strategy: str, work: Workload, machine: Machine, num_ranks: int) -> str:
    """Return the main bottleneck on N ranks: the cost that lengthens a step most."""
    if num_ranks == 1 or strategy == "single":
        return "one device"
    whole = step_seconds(strategy, work, machine, num_ranks)
    first, other = (each._replace(fixed=0.0) for each in (work.alone, work.together))
    free = replace(work, alone=first, together=other, optimizer_seconds=0.0)
    without: dict[str, tuple[Workload, Machine]] = {
        "bandwidth": (work, _with_links(machine, bits_per_second=math.inf)),
        "latency": (work, _with_links(machine, latency_seconds=0.0)),
        "stragglers": (replace(work, variation=0.0), machine),
        "cores": (work, replace(machine, cores_per_host=math.inf)),
        "a step's fixed cost": (free, machine),
    }
    gains = {
        name: whole - step_seconds(strategy, w, m, num_ranks) for name, (w, m) in without.items()
    }
    most = max(gains, key=lambda name: gains[name])
    return most if gains[most] > 0.05 * whole else "computing"


def _with_links(machine: Machine, **changes: float) -> Machine:
    """Return the machine, but change the rate or the latency of all its links."""
    inside = None if machine.inside is None else replace(machine.inside, **changes)
    return replace(machine, link=replace(machine.link, **changes), inside=inside)
