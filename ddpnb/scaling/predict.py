"""What is asked of a prediction, and the answer: numbers to be shown.  (Kernel.)"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ddpnb.protocol.costs import BEST
from ddpnb.protocol.devices import Compute
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import LINKS, SECONDS, parse_link, parse_quantity
from ddpnb.protocol.options import check_options, option
from ddpnb.scaling.calibrate import Calibration
from ddpnb.scaling.model import (
    FORMULAS,
    Machine,
    Point,
    Workload,
    formula_of,
    limit_of,
    point,
    stops_at,
)

MAX_RANKS = 1_000_000
SEARCHED = 4096
"""Ranks up to which it is looked where a strategy stops scaling, if no more are asked for."""
STRATEGIES = ("ddp", "async", "local-sgd")
"""Where none is named, and the comparison has none beside ``single`` and ``no-comm``."""
INSIDE = "pcie4"
"""Between the ranks of one of several hosts, where nothing is said."""
DEVICE_VARIATION = 0.02
"""Of devices of one kind, where a step is given: standard deviation over mean.  Source: Sinha et
al., "Not All GPUs Are Created Equal", SC 2022: 8 % from slow to fast, read as 4 deviations."""


def parse_step(text: str) -> tuple[float, int]:
    """Parse ``178ms/64``: the seconds of a step on one device, and its samples."""
    time, _, samples = text.replace(" ", "").partition("/")
    seconds = parse_quantity(time, SECONDS)
    if not (seconds > 0 and samples.isdecimal() and int(samples) > 0):
        raise UserError(
            f"--step {text}: write the time of a step on one device and its samples, as 178ms/64."
        )
    return seconds, int(samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be predicted, as the user writes it."""

    ranks: tuple[int, ...] = option(
        (1, 2, 4, 8),
        "numbers of ranks",
        least=1,
        most=MAX_RANKS,
        most_values=100,
        example="1,8,64",
    )
    strategies: tuple[str, ...] = option(
        (),
        "which strategies; by default those compared",
        most_values=64,
        example="ddp,async",
        offers=tuple(FORMULAS),
    )
    link: str = option(
        "",
        "between the ranks, with --hosts between hosts; or 1Gbit,0.5ms; by default this "
        "machine, as it was measured, or the devices that were emulated",
        example="100GbE",
        offers=tuple(LINKS),
    )
    ranks_per_host: int | None = option(
        None, "ranks on each host; --link is between hosts", flag="--hosts", least=1
    )
    inside: str = option(
        "", "the link between the ranks of a host", example="pcie4", offers=tuple(LINKS)
    )
    step: str = option(
        "",
        "of another device, in place of this machine's: the seconds for so many samples",
        example="178ms/64",
    )
    accumulate: int | None = option(None, "micro-batches of --step; by default 1", least=1)
    batch_per_worker: int | None = option(
        None,
        "samples of each rank in a step; by default as in the comparison or in --step",
        least=1,
    )

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "ranks", tuple(sorted(self.ranks)))
        for strategy in self.strategies:
            formula_of(strategy)
        others = {"--hosts": self.ranks_per_host, "--inside": self.inside, "--step": self.step}
        if given := [name for name, value in others.items() if value and not self.link]:
            raise UserError(f"{given[0]} goes with --link, which says what lies between hosts.")
        if self.inside and self.ranks_per_host is None:
            raise UserError("--inside goes with --hosts, the number of ranks on each host.")
        if self.accumulate and not self.step:
            raise UserError("--accumulate goes with --step; a comparison has its own.")
        for link in filter(None, (self.link, self.inside)):
            parse_link(link)
        if self.step:
            parse_step(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What would happen on other numbers of ranks."""

    found: Calibration
    question: Question
    work: Workload
    machine: Machine
    """That is asked about."""
    points: Mapping[str, tuple[Point, ...]]
    """By strategy, at those numbers of ranks asked for that have a sample each."""
    stops: Mapping[str, int | None]
    """From where twice the ranks bring less than a tenth more; None: not up to ``searched``."""
    searched: int
    limits: Mapping[str, str]
    """What holds each strategy up most at the most ranks."""

    @property
    def measured(self) -> Mapping[str, float]:
        """The comparison's samples/s of what is predicted, and of ``single``."""
        rates = self.found.measured.rates
        if self.question.step:  # another device's
            return {}
        return {name: rates[name] for name in ("single", *self.points) if name in rates}


def predict(found: Calibration, question: Question) -> Prediction:
    """Answer a question.

    Raises:
        UserError: exchanges were not measured, and no link is named; a strategy or a number of
            ranks makes no sense there.
    """
    measured = found.measured
    if not question.link and not measured.has_exchange:
        raise UserError(
            f"{measured.name} has no ddp on two ranks or more, so that an exchange on this "
            "machine is not known: compare ddp too, or name a network with --link."
        )
    usual = set(FORMULAS) - {"single", "no-comm"}
    compared = tuple(name for name in measured.rates if name.partition(":")[0] in usual)
    strategies = question.strategies or compared or STRATEGIES
    per_host = question.ranks_per_host
    if per_host and "dp" in strategies and max(question.ranks) > per_host:
        raise UserError("dp is one process, which cannot use several hosts: leave it out.")
    work, machine = _placed(found, question)
    able = [n for n in question.ranks if work.samples(n) >= 1]
    if not able:
        raise UserError(
            f"A batch of {work.batch_size:g} has no sample for each of {min(question.ranks)} "
            "ranks: ask for fewer, or give each its own with --batch-per-worker."
        )

    searched = max(*question.ranks, SEARCHED)
    return Prediction(
        found=found,
        question=question,
        work=work,
        machine=machine,
        points={name: tuple(point(name, work, machine, n) for n in able) for name in strategies},
        searched=searched,
        stops={name: stops_at(name, work, machine, searched) for name in strategies},
        limits={name: limit_of(name, work, machine, max(able)) for name in strategies},
    )


def _placed(found: Calibration, question: Question) -> tuple[Workload, Machine]:
    """Return the workload, and the machine that is asked about."""
    work, machine, is_emulated = found.work, found.here, found.measured.devices is not None
    if question.step:
        seconds, samples = parse_step(question.step)
        alone = Compute(seconds / samples)
        work = Workload(
            alone=alone,
            together=alone,
            batch_size=samples,
            is_weak=True,
            num_bytes=work.num_bytes,
            num_passes=question.accumulate or 1,
            variation=DEVICE_VARIATION,
        )
    if question.batch_per_worker is not None:
        work = replace(work, batch_size=question.batch_per_worker, is_weak=True)
    is_ring = not question.step and (found.measured.shares_cores or is_emulated)
    algorithm = "ring" if is_ring else BEST
    if not question.link:
        return work, replace(machine, algorithm=algorithm)
    per_host = question.ranks_per_host
    machine = Machine(
        link=parse_link(question.link),
        inside=parse_link(question.inside or INSIDE) if per_host else None,
        algorithm=algorithm,
        ranks_per_host=per_host or 1,
    )
    work = replace(work, together=work.alone)
    return (work if is_emulated else replace(work, overlaps=True, factors={})), machine
