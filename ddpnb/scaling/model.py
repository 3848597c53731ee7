"""How long does a step of each strategy take on N ranks?  (Kernel.)

A step is what a rank computes, and the part of its exchanges that nothing hides:

    compute    c(b) = fixed + per_sample * b, b the samples of a rank; on shared cores in turns
    exchanges  those of each strategy, with the messages of ``protocol.costs``
    waiting    of N ranks the slowest: c * variation * expected_max(N)

docs/prediction.md has every formula with its source.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.costs import (
    ALL_REDUCES,
    BEST,
    BUCKET_BYTES,
    COLLECTIVES,
    Ready,
    bucket_sizes,
    in_turn,
    num_parts,
)
from ddpnb.protocol.devices import FORWARD_SHARE
from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.notation import Choice, LinkSpec, parse_strategy, slower_of
from ddpnb.scaling.waiting import expected_max, on_cores, server_bound

MEGABYTE = 2**20
NO_GAIN = 1.1
"""Twice as many ranks that bring less than this times the throughput: it has stopped scaling."""


class Cost(NamedTuple):
    """The seconds that a rank computes in a step."""

    fixed: float
    per_sample: float

    def of(self, samples: float) -> float:
        """Return those of so many samples."""
        return self.fixed + self.per_sample * samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained, measured on one rank and on several."""

    alone: Cost
    """Of one rank alone."""
    together: Cost
    """Of each of ``num_together`` ranks at once, which send nothing."""
    num_together: int = 1
    batch_size: float
    """Of all ranks; with ``is_weak`` of each."""
    is_weak: bool = False
    batches: tuple[tuple[int, int], ...] = ()
    """Sizes of the batches of all ranks, and how many have each; empty, or weak: all are whole."""
    num_bytes: float
    """Of the gradients, and of the parameters."""
    num_trained_bytes: float | None = None
    """Of the gradients of the model that is trained, where it stands for another."""
    backward_share: float = 1 - FORWARD_SHARE
    """Of forward and backward pass."""
    optimizer_seconds: float = 0.0
    """Of ``fixed``: what comes after the last exchange."""
    variation: float = 0.0
    """Of a rank's computing from step to step: standard deviation over mean."""
    overlaps: bool = True
    """Whether a bucket is sent as soon as its share of the backward pass is over."""
    wrapper_seconds: float = 0.0
    """What DDP itself adds to a step."""
    replica_seconds: float = 0.0
    """What Python takes for each replica of DataParallel in a step."""
    num_layers: int = 12
    """Parts in which FSDP gathers the parameters."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Of a strategy's exchanges: measured over modelled."""

    def samples(self, num_ranks: int) -> float:
        """Return the samples of one rank in a step."""
        return self.batch_size if self.is_weak else self.batch_size / num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where it is trained."""

    link: LinkSpec
    """Between hosts; where nothing lies inside these, between all ranks."""
    inside: LinkSpec | None = None
    """Between the ranks of one host."""
    ranks_per_host: float = math.inf
    algorithm: str = "ring"
    """Of all-reduces; ``BEST``: the faster one."""
    cores_per_host: float = math.inf
    """That the ranks of a host share; infinite: each rank has a device of its own."""
    is_link_of_cores: bool = False
    """Whether the cores do the work of a network card, so that exchanges share them too."""
    is_crowded: bool = True
    """Whether ranks of a host slow each other down as those measured here do."""

    def on_host(self, num_ranks: int) -> float:
        """Return how many ranks a host has."""
        return min(num_ranks, self.ranks_per_host)

    def link_of(self, num_ranks: int) -> LinkSpec:
        """Return the link over which ranks exchange; a ring of several hosts has both."""
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

    def all_reduce(self, num_bytes: float, num_ranks: int) -> float:
        """Return how long an all-reduce takes."""
        if num_ranks == 1:
            return 0.0
        names = ("ring", "double-tree") if self.algorithm == BEST else (self.algorithm,)
        costs = (ALL_REDUCES[name].cost(num_bytes, num_ranks) for name in names)
        return min(cost.seconds(self.link_of(num_ranks)) for cost in costs)


class Point(NamedTuple):
    """A strategy on so many ranks."""

    num_ranks: int
    step_seconds: float
    samples_per_second: float
    efficiency: float
    """Over N times the throughput of one rank alone."""


def cost(work: Workload, machine: Machine, num_ranks: int) -> Cost:
    """Return what a step costs one of N ranks, between that alone and that measured together."""
    busy = min(machine.on_host(num_ranks), machine.cores_per_host)
    measured = min(work.num_together, machine.cores_per_host)
    if not machine.is_crowded or measured <= 1:
        share = 0.0
    else:
        share = min(1.0, (busy - 1) / (measured - 1))
    return Cost(*(a + share * (b - a) for a, b in zip(work.alone, work.together, strict=True)))


# -- the strategies ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that a strategy's formula is made of."""

    work: Workload
    machine: Machine
    num_ranks: int
    chosen: Choice
    size: float
    """Bytes of what is sent, after compression."""

    def option(self, name: str) -> float:
        """Return an option of the strategy, or its default."""
        default = STRATEGIES[self.chosen.name].options[name].default
        value = self.chosen.options.get(name, default)
        assert isinstance(value, bool | int | float)
        return float(value)

    def computing(self, *, meets: bool = True) -> float:
        """Return the seconds that a rank computes in a step; ``meets``: all in step."""
        work, machine, num = self.work, self.machine, self.num_ranks
        samples = math.ceil(work.samples(num)) if meets else work.samples(num)
        own = cost(work, machine, num).of(samples)
        here, cores = machine.on_host(num), machine.cores_per_host
        if not meets:
            return own * max(1.0, here / cores)
        turns = on_cores(own, int(here), cores) if math.isfinite(here) else own
        return turns + own * work.variation * expected_max(num)

    def all_reduce(self, num_bytes: float) -> float:
        """Return how long an all-reduce takes."""
        return self.machine.all_reduce(num_bytes, self.num_ranks)

    def exchange(self, name: str, num_bytes: float) -> float:
        """Return how long another collective takes."""
        messages = COLLECTIVES[name].cost(num_bytes, self.num_ranks)
        return messages.seconds(self.machine.link_of(self.num_ranks))


def _no_comm(case: Situation) -> float:
    return case.computing(meets=False)


def _ddp(case: Situation) -> float:
    return _in_buckets(case, case.option("bucket_cap_mb") * MEGABYTE)


def _in_buckets(case: Situation, cap: float) -> float:
    """A bucket is ready, and sent, as by the clocks of emulated devices."""
    work, compute = case.work, case.computing()
    backward = work.backward_share * (compute - min(work.optimizer_seconds, compute))
    trained = work.num_trained_bytes or work.num_bytes
    now = free = 0.0
    for bucket in bucket_sizes(trained, cap):
        share = bucket / trained
        size, begun = share * case.size, now + share * work.wrapper_seconds
        now = begun + share * backward
        end = backward + work.wrapper_seconds
        ready: Ready = (begun, now) if work.overlaps else (end, end)
        number = num_parts(size, ready)
        _, free = in_turn(case.all_reduce(size / number), number, [ready], free)[-1]
    return compute - backward + max(now, free)


def _in_one(case: Situation) -> float:
    return case.computing() + case.all_reduce(case.size)


def _dp(case: Situation) -> float:
    """Parameters out, gradients in; samples and outputs count as messages without bytes."""
    case = replace(case, machine=replace(case.machine, ranks_per_host=math.inf))  # one process
    python = case.num_ranks * case.work.replica_seconds
    sent = 2 * case.exchange("gather", case.size) + 3 * case.exchange("gather", 0.0)
    return case.computing() + python + sent


def _central(case: Situation) -> float:
    sent = case.exchange("reduce", case.size) + case.exchange("broadcast", case.size)
    return case.computing() + sent


def _zero(case: Situation) -> float:
    each = case.exchange("broadcast", case.size / case.num_ranks)
    return _in_buckets(case, BUCKET_BYTES) + case.num_ranks * each


def _fsdp(case: Situation) -> float:
    layers = case.work.num_layers
    one = case.exchange("reduce_scatter", case.size / layers)  # a gather takes as long
    compute, exchanged = case.computing(), 3 * layers * one
    if not case.work.overlaps:
        return compute + exchanged
    return max(compute, exchanged - 2 * one) + 2 * one  # the first gather and the last scatter


def _rounds(case: Situation) -> float:
    every = case.option("every")
    own, meeting = case.computing(meets=False), case.computing()
    waiting = max(meeting - own, 0.0) / math.sqrt(every)
    return own + waiting + case.all_reduce(case.size) / every


def _gossip(case: Situation) -> float:
    return case.computing() + case.exchange("send", case.size)


def _async(case: Situation, num_shards: int = 1) -> float:
    """Rank 0 trains beside the server and uses no link, where there is one server."""
    compute = case.computing(meets=False)
    num_away = case.num_ranks - (1 if num_shards == 1 else 0)
    rate = 1 / compute if num_shards == 1 else 0.0
    if num_away:
        link = case.machine.link_of(case.num_ranks)
        rate += server_bound(link, case.size, compute, num_away, num_shards=num_shards)
    return case.num_ranks / rate


FORMULAS: Mapping[str, Callable[[Situation], float]] = {
    "single": _no_comm,
    "no-comm": _no_comm,
    "ddp": _ddp,
    "ddp-by-hand": _in_one,
    "ring-by-hand": _in_one,
    "dp": _dp,
    "central": _central,
    "zero": _zero,
    "fsdp": _fsdp,
    "local-sgd": _rounds,
    "diloco": _rounds,
    "gossip": _gossip,
    "async": _async,
}
"""The seconds of one step of one rank."""

SHARDED = "async-shards"
"""``async-shards=4``: a parameter server in 4 parts on hosts of their own; a prediction alone."""

PREDICTABLE = (*FORMULAS, f"{SHARDED}=")
"""What users may name, for lists."""


def step_seconds(strategy: str, work: Workload, machine: Machine, num_ranks: int) -> float:
    """Return how long a strategy takes for each whole batch on N ranks.

    Where batches differ in size: for as many samples as a whole batch has.

    Raises:
        UserError: there is no such strategy, or it cannot be predicted.
    """
    if work.is_weak or not work.batches:
        return _seconds(strategy, work, machine, num_ranks)
    seconds = (
        num * _seconds(strategy, replace(work, batch_size=size), machine, num_ranks)
        for size, num in work.batches
    )
    return sum(seconds) * work.batch_size / sum(size * num for size, num in work.batches)


def _seconds(strategy: str, work: Workload, machine: Machine, num_ranks: int) -> float:
    """Return how long a batch takes."""
    chosen, formula = _formula_of(strategy)
    if num_ranks == 1:
        return cost(work, machine, 1).of(work.samples(1))
    case = Situation(
        work=work, machine=machine, num_ranks=num_ranks, chosen=chosen, size=_size(chosen, work)
    )
    seconds, factor = formula(case), work.factors.get(strategy, 1.0)
    without = case.computing(meets=False)
    return without + factor * (seconds - without)


def point(strategy: str, work: Workload, machine: Machine, num_ranks: int) -> Point:
    """Return throughput and efficiency of a strategy on N ranks."""
    seconds = step_seconds(strategy, work, machine, num_ranks)
    trained = 1 if strategy == "single" else num_ranks
    rate = trained * work.samples(trained) / seconds
    return Point(num_ranks, seconds, rate, rate / num_ranks / alone(work, machine))


def alone(work: Workload, machine: Machine) -> float:
    """Return the samples/s of one rank alone."""
    return work.samples(1) / step_seconds("single", work, machine, 1)


def stops_at(strategy: str, work: Workload, machine: Machine, most: int) -> int | None:
    """Return the smallest power of two from which twice the ranks bring little; None up to most.

    Little is less than ``NO_GAIN`` times the throughput; a rank with less than a sample is none.
    """
    ranks = 1
    while 2 * ranks <= most:
        if work.samples(2 * ranks) < 1:
            return ranks
        now, then = (
            point(strategy, work, machine, n).samples_per_second for n in (ranks, 2 * ranks)
        )
        if then < NO_GAIN * now:
            return ranks
        ranks *= 2
    return None


def limit_of(strategy: str, work: Workload, machine: Machine, num_ranks: int) -> str:
    """Return what a step on N ranks would gain most without, in a few words."""
    if num_ranks == 1:
        return "one device"
    whole = step_seconds(strategy, work, machine, num_ranks)
    without: dict[str, tuple[Workload, Machine]] = {
        "bandwidth": (work, _with_links(machine, bits_per_second=math.inf)),
        "latency": (work, _with_links(machine, latency_seconds=0.0)),
        "stragglers": (replace(work, variation=0.0), machine),
        "cores": (work, replace(machine, cores_per_host=math.inf)),
        "a step's fixed cost": (_without_fixed(work), machine),
    }
    gains = {
        name: whole - step_seconds(strategy, w, m, num_ranks) for name, (w, m) in without.items()
    }
    most = max(gains, key=lambda name: gains[name])
    return most if gains[most] > 0.05 * whole else "computing"


def amdahl(work: Workload, num_ranks: int) -> float:
    """Return the most samples/s of N ranks where a step's fixed cost is on every rank.

        1 / (s + (1 - s) / N)  times those of one,    s = fixed / (fixed + per_sample * batch)

    Source: Amdahl, "Validity of the single processor approach ...", AFIPS 1967.  Where the batch
    grows with the ranks it is N times those of one.
    """
    return num_ranks * work.samples(num_ranks) / work.alone.of(work.samples(num_ranks))


def link_ceiling(work: Workload, machine: Machine, num_ranks: int) -> float:
    """Return the most samples/s that a link lets through, if nothing else took any time.

    A global batch for each all-reduce, of which only the bytes count: the slanted roof of Williams,
    Waterman and Patterson, "Roofline", CACM 52(4), 2009, with the link in place of the memory.
    """
    free = _with_links(machine, latency_seconds=0.0)
    seconds = free.all_reduce(work.num_bytes, num_ranks)
    return num_ranks * work.samples(num_ranks) / seconds if seconds > 0 else math.inf


def check_strategy(strategy: str) -> None:
    """Raise a UserError unless there is such a strategy and it can be predicted."""
    _formula_of(strategy)


def _formula_of(strategy: str) -> tuple[Choice, Callable[[Situation], float]]:
    if strategy.startswith(f"{SHARDED}="):
        number = strategy.partition("=")[2]
        if not number.isdecimal() or int(number) < 1:
            raise UserError(f"Write {SHARDED}=4, with the number of shards, not {strategy}.")
        return Choice(name="async"), lambda case: _async(case, int(number))
    name = strategy.partition(":")[0]
    if name not in STRATEGIES:
        raise one_of("strategy", name, PREDICTABLE)
    if STRATEGIES[name].needs_shared_memory:
        raise UserError(
            f"{name} trains in memory that its ranks share, which no link offers: it is measured "
            "by %ddp_compare, not predicted."
        )
    chosen = parse_strategy(strategy)
    if name not in FORMULAS:
        raise UserError(f"{strategy} cannot be predicted; these can: {', '.join(PREDICTABLE)}.")
    return chosen, FORMULAS[name]


def _size(chosen: Choice, work: Workload) -> float:
    halved = chosen.options.get("hook") in ("fp16", "bf16")
    return work.num_bytes / 2 if halved else work.num_bytes


def _with_links(machine: Machine, **changes: float) -> Machine:
    """Return a machine with links of another rate or latency."""
    inside = None if machine.inside is None else replace(machine.inside, **changes)
    return replace(machine, link=replace(machine.link, **changes), inside=inside)


def _without_fixed(work: Workload) -> Workload:
    return replace(
        work,
        alone=work.alone._replace(fixed=0.0),
        together=work.together._replace(fixed=0.0),
        optimizer_seconds=0.0,
    )
