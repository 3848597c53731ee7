"""The options of ``%ddp_predict``, and the predicted numbers.  Runs in the kernel."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ddpnb.prediction.calibrate import Calibration
from ddpnb.prediction.model import (
    FORMULAS,
    Machine,
    Point,
    Workload,
    formula_of,
    limit_of,
    point,
    stops_at,
)
from ddpnb.protocol.costs import BEST
from ddpnb.protocol.devices import Compute
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import LINKS, TIME_UNITS, parse_link, parse_quantity
from ddpnb.protocol.options import check_options, option

MAX_PREDICTED_RANKS = 1_000_000
SEARCHED = 4096
"""ddpnb searches for the end of scaling up to at least this number of ranks."""
DEFAULT_STRATEGIES = ("ddp", "async", "local-sgd")
"""The strategies to predict if the comparison has only ``single`` and ``no-comm``."""
INSIDE = "pcie4"
"""Default link between the ranks of one host, with ``--hosts``."""
DEVICE_VARIATION = 0.02
"""Variation between equal devices with ``--step``: standard deviation / mean.  Sinha et al., "Not
All GPUs Are Created Equal", SC 2022, report a range of 8 % (taken as 4 standard deviations)."""


def parse_step(text: str) -> tuple[float, int]:
    """Parse the seconds and the samples of a step on one device, such as ``178ms/64``."""
    time, _, samples = text.replace(" ", "").partition("/")
    seconds = parse_quantity(time, TIME_UNITS)
    if not (seconds > 0 and samples.isdecimal() and int(samples) > 0):
        raise UserError(
            f"--step {text} is not valid. Write the time and the samples of a step on one device, "
            "such as 178ms/64."
        )
    return seconds, int(samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The options of ``%ddp_predict``."""

    ranks: tuple[int, ...] = option(
        (1, 2, 4, 8),
        "numbers of ranks to predict",
        least=1,
        most=MAX_PREDICTED_RANKS,
        most_values=100,
        example="1,8,64",
    )
    strategies: tuple[str, ...] = option(
        (),
        "strategies to predict; by default the strategies of the comparison",
        most_values=64,
        example="ddp,async",
        offers=tuple(FORMULAS),
    )
    link: str = option(
        "",
        "network between ranks, or between hosts with --hosts: a name, or rate and latency such as "
        "1Gbit,0.5ms; by default the links of the comparison's machine or emulated devices",
        example="100GbE",
        offers=tuple(LINKS),
    )
    ranks_per_host: int | None = option(
        None, "number of ranks on each host; --link connects the hosts", flag="--hosts", least=1
    )
    inside: str = option(
        "", "link between the ranks of one host", example="pcie4", offers=tuple(LINKS)
    )
    step: str = option(
        "",
        "time and samples of a step that you measured on another device",
        example="178ms/64",
    )
    accumulate: int | None = option(
        None, "number of micro-batches in the step that --step describes; by default 1", least=1
    )
    batch_per_worker: int | None = option(
        None,
        "number of samples of each rank in a step; by default as in the comparison or in --step",
        least=1,
    )

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "ranks", tuple(sorted(self.ranks)))
        for strategy in self.strategies:
            formula_of(strategy)
        others = {"--hosts": self.ranks_per_host, "--inside": self.inside, "--step": self.step}
        if given := [name for name, value in others.items() if value and not self.link]:
            raise UserError(f"{given[0]} needs --link, the network between the hosts.")
        if self.inside and self.ranks_per_host is None:
            raise UserError("--inside needs --hosts, the number of ranks on each host.")
        if self.accumulate and not self.step:
            raise UserError("--accumulate needs --step, the time of a step on another device.")
        for link in filter(None, (self.link, self.inside)):
            parse_link(link)
        if self.step:
            parse_step(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted throughput on other numbers of ranks."""

    found: Calibration
    question: Question
    work: Workload
    machine: Machine
    """The machine for which the throughput is predicted."""
    points: Mapping[str, tuple[Point, ...]]
    """Predictions by strategy, for each number of ranks with at least one sample per rank."""
    stops: Mapping[str, int | None]
    """Number of ranks at which doubling adds less than 10 % speed; None if above ``searched``."""
    searched: int
    limits: Mapping[str, str]
    """The main bottleneck of each strategy at the largest number of ranks."""

    @property
    def measured(self) -> Mapping[str, float]:
        """The measured samples/s of ``single`` and of the predicted strategies."""
        rates = self.found.measured.rates
        if self.question.step:  # the prediction is for another device
            return {}
        return {name: rates[name] for name in ("single", *self.points) if name in rates}


def answer(found: Calibration, question: Question) -> Prediction:
    """Return the prediction that answers a question.

    Raises:
        UserError: the cost of exchanges is unknown, or a strategy or number of ranks is impossible.
    """
    measured = found.measured
    if not question.link and not measured.has_exchange:
        raise UserError(
            f"{measured.name} has no run of ddp on two or more ranks, so the cost of an "
            "exchange on this machine is unknown. Compare ddp too, or name a network with --link."
        )
    usual = set(FORMULAS) - {"single", "no-comm"}
    compared = tuple(name for name in measured.rates if name.partition(":")[0] in usual)
    strategies = question.strategies or compared or DEFAULT_STRATEGIES
    per_host = question.ranks_per_host
    if per_host and "dp" in strategies and max(question.ranks) > per_host:
        raise UserError("dp is one process and cannot use several hosts. Remove dp or --hosts.")
    work, machine = _placed(found, question)
    able = [n for n in question.ranks if work.samples(n) >= 1]
    if not able:
        raise UserError(
            f"A batch of {work.batch_size:g} has too few samples for {min(question.ranks)} ranks. "
            "Ask for fewer ranks, or set the samples of each rank with --batch-per-worker."
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
    """Return the workload and the machine that the question describes."""
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
        backend=machine.backend if is_ring else "nccl",
        ranks_per_host=per_host or 1,
    )
    work = replace(work, together=work.alone)
    return (work if is_emulated else replace(work, overlaps=True, factors={})), machine
