"""What is asked of a prediction, and the answer: numbers to be shown.  (Kernel.)"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ddpnb.protocol.costs import ALL_REDUCES, BEST
from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.notation import LinkSpec, parse_link
from ddpnb.scaling.calibrate import Calibration
from ddpnb.scaling.model import (
    Machine,
    Point,
    Workload,
    alone,
    amdahl,
    check_strategy,
    limit_of,
    link_ceiling,
    point,
    stops_at,
)

MAX_RANKS = 1_000_000
STRATEGIES = ("ddp", "async", "local-sgd")
"""Where none is named, and the comparison has none beside ``single`` and ``no-comm``."""
INSIDE = "pcie4"
"""Between the ranks of one of several hosts, where nothing is said."""


class Seen(NamedTuple):
    """A point of the comparison."""

    strategy: str
    num_ranks: int
    samples_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be predicted, as the user writes it."""

    ranks: tuple[int, ...]
    strategies: tuple[str, ...] = ()
    link: str = ""
    """Empty: this machine, as it was measured, or the devices that were emulated."""
    ranks_per_host: int | None = None
    inside: str = ""
    cores: int | None = None
    """That the ranks of a host share; None: each has a device of its own."""
    algorithm: str = ""
    batch_per_worker: int | None = None
    samples: float | None = None
    """To the target, with the smallest batches."""
    critical_batch: float | None = None

    def __post_init__(self) -> None:
        for rank in self.ranks:
            if not 1 <= rank <= MAX_RANKS:
                raise UserError(f"--ranks {rank}: give numbers of ranks from 1 to {MAX_RANKS:,}.")
        if not self.ranks:
            raise UserError("--ranks names no number of ranks: write them as 1,2,4,8.")
        for strategy in self.strategies:
            check_strategy(strategy)
        for name, value in (
            ("--hosts", self.ranks_per_host),
            ("--cores", self.cores),
            ("--batch-per-worker", self.batch_per_worker),
            ("--samples", self.samples),
            ("--critical-batch", self.critical_batch),
        ):
            if value is not None and not value > 0:
                raise UserError(f"{name} must be greater than 0, not {value:g}.")
        if self.algorithm not in ("", BEST, *ALL_REDUCES):
            raise one_of("algorithm", self.algorithm, (*ALL_REDUCES, BEST))
        if (self.samples is None) != (self.critical_batch is None):
            raise UserError(
                "Time to a target needs both --samples, those that small batches need, and "
                "--critical-batch: give both, or neither."
            )
        others = {"--hosts": self.ranks_per_host, "--inside": self.inside, "--cores": self.cores}
        if given := [name for name, value in others.items() if value and not self.link]:
            raise UserError(f"{given[0]} goes with --link, which says what lies between hosts.")
        if self.inside and self.ranks_per_host is None:
            raise UserError("--inside goes with --hosts, the number of ranks on each host.")
        for link in filter(None, (self.link, self.inside)):
            parse_link(link)


def parse_numbers(text: str) -> tuple[int, ...]:
    """Parse ``1,2,4,8``."""
    try:
        numbers = {int(part) for part in text.replace(" ", "").split(",") if part}
    except ValueError:
        raise UserError(f"Write --ranks as 1,2,4,8, not {text}.") from None
    return tuple(sorted(numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What would happen on other numbers of ranks."""

    title: str
    ranks: tuple[int, ...]
    """Those asked for."""
    points: Mapping[str, tuple[Point, ...]]
    """By strategy, at those ranks that have a sample each."""
    lines: Mapping[str, tuple[Point, ...]]
    """The same, close enough to be drawn as lines."""
    stops: Mapping[str, int | None]
    """From where twice the ranks bring less than a tenth more; None: not up to ``searched``."""
    searched: int
    limits: Mapping[str, str]
    """What holds each strategy up most at the most ranks."""
    ideal: tuple[tuple[int, float], ...]
    """Ranks, and N times the samples/s of one alone."""
    amdahl: tuple[tuple[int, float], ...]
    roof: tuple[tuple[int, float], ...]
    """The link's ceiling: what an all-reduce's bytes alone let through."""
    measured: tuple[Seen, ...]
    """Points of the comparison."""
    devices: str
    """Those that the comparison emulates, in words; empty: it was measured."""
    assumptions: tuple[str, ...]
    seconds_to_target: Mapping[str, tuple[float, ...]]
    """By strategy, at its ``points``; empty if nothing is known of the target."""


def predict(found: Calibration, question: Question) -> Prediction:
    """Answer a question.

    Raises:
        UserError: exchanges were not measured, and no link is named.
    """
    work, machine = _placed(found, question)
    measured = tuple(name for name in found.measured.rates if name not in ("single", "no-comm"))
    strategies = question.strategies or tuple(filter(_can, measured)) or STRATEGIES
    if not question.link and not found.knows_link:
        raise UserError(
            f"{found.measured.name} has no ddp on two ranks or more, so that an exchange on this "
            "machine is not known: compare ddp too, or name a network with --link."
        )
    if (
        question.ranks_per_host
        and "dp" in strategies
        and max(question.ranks) > question.ranks_per_host
    ):
        raise UserError("dp is one process, which cannot use several hosts: leave it out.")
    able = [n for n in question.ranks if work.samples(n) >= 1]
    if not able:
        raise UserError(
            f"A batch of {work.batch_size:g} has no sample for each of {min(question.ranks)} "
            "ranks: ask for fewer, or give each its own with --batch-per-worker."
        )
    points = {name: tuple(point(name, work, machine, n) for n in able) for name in strategies}
    ends = _dense(max(able), found.measured.num_ranks, work)
    searched = max(max(question.ranks), 4096)
    times = {
        name: tuple(
            seconds_to_target(
                each.samples_per_second,
                work.samples(each.num_ranks) * each.num_ranks,
                question.samples,
                question.critical_batch,
            )
            for each in row
        )
        for name, row in points.items()
        if question.samples is not None and question.critical_batch is not None
    }
    one = alone(work, machine)
    return Prediction(
        title=f"{found.measured.name} on up to {max(question.ranks):,} ranks",
        ranks=question.ranks,
        points=points,
        lines={name: tuple(point(name, work, machine, n) for n in ends) for name in strategies},
        stops={name: stops_at(name, work, machine, searched) for name in strategies},
        searched=searched,
        limits={name: limit_of(name, work, machine, max(able)) for name in strategies},
        ideal=tuple((n, n * one) for n in ends),
        amdahl=() if work.is_weak else tuple((n, amdahl(work, n)) for n in ends),
        roof=tuple((n, link_ceiling(work, machine, n)) for n in ends if n > 1),
        measured=_seen(found, strategies),
        devices=found.measured.devices.text if found.measured.devices else "",
        assumptions=_assumptions(found, question, work, machine, len(able) < len(question.ranks)),
        seconds_to_target=times,
    )


def _placed(found: Calibration, question: Question) -> tuple[Workload, Machine]:
    work, machine = found.work, found.here
    if question.batch_per_worker is not None:
        work = replace(work, batch_size=question.batch_per_worker, is_weak=True)
    is_emulated = found.measured.devices is not None
    is_ring = found.measured.shares_cores or is_emulated
    algorithm = question.algorithm or ("ring" if is_ring else BEST)
    if not question.link:
        return work, replace(machine, algorithm=algorithm)
    per_host = question.ranks_per_host
    machine = Machine(
        link=parse_link(question.link),
        inside=parse_link(question.inside or INSIDE) if per_host else None,
        algorithm=algorithm,
        cores_per_host=question.cores or math.inf,
        ranks_per_host=per_host or (math.inf if question.cores else 1),
        is_crowded=question.cores is not None,
    )
    return (work if is_emulated else replace(work, overlaps=True, factors={})), machine


def _can(strategy: str) -> bool:
    try:
        check_strategy(strategy)
    except UserError:
        return False
    return True


def _dense(most: int, measured: int, work: Workload) -> list[int]:
    """Return ranks at which lines are drawn: all up to 16, then eight for each doubling."""
    most = max(most, measured)
    while most > 1 and work.samples(most) < 1:
        most -= 1
    steps = range(int(8 * math.log2(max(most, 1))) + 1)
    found = {*range(1, min(most, 16) + 1), *(round(2 ** (step / 8)) for step in steps), most}
    return sorted(found)


def _seen(found: Calibration, strategies: tuple[str, ...]) -> tuple[Seen, ...]:
    measured = found.measured
    return tuple(
        Seen(name, 1 if name == "single" else measured.num_ranks, rate)
        for name, rate in measured.rates.items()
        if name in ("single", "no-comm", *strategies)
    )


# -- what a larger batch costs -------------------------------------------------------------


def samples_at(batch_size: float, fewest_samples: float, critical_batch: float) -> float:
    """Return the samples to a given loss with a batch size.

        E(B) = E_min (1 + B / B_crit)

    with E_min the samples that the smallest batches need.  Source: McCandlish, Kaplan and Amodei,
    "An Empirical Model of Large-Batch Training", arXiv:1812.06162, 2018, equations 2.11 and 2.12:
    (S / S_min - 1) (E / E_min - 1) = 1, E = B S and B_crit = E_min / S_min.
    """
    return fewest_samples * (1 + batch_size / critical_batch)


def seconds_to_target(
    samples_per_second: float, batch_size: float, fewest_samples: float, critical_batch: float
) -> float:
    """Return how long a training takes to a given loss: ``samples_at`` over the rate."""
    return samples_at(batch_size, fewest_samples, critical_batch) / samples_per_second


# -- every assumption, in words ------------------------------------------------------------


def _assumptions(
    found: Calibration, question: Question, work: Workload, machine: Machine, has_too_many: bool
) -> tuple[str, ...]:
    measured = found.measured
    share = work.alone.fixed / work.alone.of(work.samples(1))
    if measured.devices is not None:
        fitted = f"Computed as in {measured.name}: {measured.devices.text}."
    else:
        fitted = (
            f"Fitted to {measured.name}: single on 1 rank, no-comm on {measured.num_ranks}, "
            f"{measured.cores} cores."
        )
    lines = [
        fitted,
        f"A step costs {1e3 * work.alone.fixed:.3g} ms and {1e6 * work.alone.per_sample:.3g} µs a "
        f"sample on one rank; the first is {100 * share:.2g} % of it."
        + (
            ""
            if found.sees_fixed
            else " All steps had one size: only the optimizer counts as fixed."
        ),
        f"Gradients and parameters have {work.num_bytes / 1e6:.3g} MB each.",
    ]
    if measured.short:
        lines.append(f"Uncertain, as trained for less than 4 s: {', '.join(measured.short)}.")
    if work.is_weak:
        lines.append(f"Each rank has {work.batch_size:g} samples a step (weak scaling).")
    else:
        lines.append(f"All ranks share batches of {work.batch_size:g} samples (strong scaling).")
    if (measured.batch_size, measured.is_weak) != (work.batch_size, work.is_weak):
        kind = "a rank" if measured.is_weak else "in all"
        lines.append(f"The measured points had batches of {measured.batch_size:g} {kind}.")
    if len(work.batches) > 1 and not work.is_weak:
        lines.append(f"Some batches are smaller, as many as in {measured.name}.")
    if has_too_many:
        lines.append(f"More than {work.batch_size:g} ranks have no sample each, and are left out.")
    lines += _where(found, question, machine)
    lines.append(
        f"A rank's step varies by {100 * work.variation:.2g} % (normal, independent): of N ranks "
        "all wait for the slowest."
    )
    lines.append(
        "DDP sends buckets of 1 MB, then of bucket_cap_mb, ready at an even rate; "
        + ("what is left of" if work.overlaps else "nothing of")
        + " the backward pass hides them."
    )
    if question.samples is not None and question.critical_batch is not None:
        lines.append(
            f"A batch B needs {question.samples:g} (1 + B / {question.critical_batch:g}) samples "
            "(McCandlish et al. 2018)."
        )
    lines.append("No congestion, no other jobs, the same device and clock on every rank.")
    return tuple(lines)


def _where(found: Calibration, question: Question, machine: Machine) -> list[str]:
    measured, link = found.measured, machine.link
    how = f"all-reduces are by {machine.algorithm}"
    if not question.link and measured.devices is None:
        cores = f"{measured.cores} cores shared by all ranks" if measured.shares_cores else "GPUs"
        return [f"This machine: {cores}; an exchange costs them {_spoken(link)}, fitted; {how}."]
    named = f"{question.link} ({link.text})" if question.link else link.text
    if machine.inside is not None:
        unsaid = question.link and not question.inside
        inside = f"{INSIDE}, as nothing was said" if unsaid else question.inside
        inside = f"{inside} ({machine.inside.text})" if inside else machine.inside.text
        lines = [
            f"Hosts of {machine.ranks_per_host:g} ranks: {inside} inside, {named} between, and a "
            f"ring over several hosts is as slow as the slower of both; {how}."
        ]
    else:
        lines = [f"Every rank has a link of its own: {named}; {how}."]
    if not question.link:
        return [*lines, "All devices of dp are in one host, as it is one process."]
    if question.cores:
        lines.append(f"The ranks of a host share {question.cores} cores like those measured.")
    else:
        lines.append("Every rank has a device of its own, as fast as one rank alone here.")
    return lines


def _spoken(link: LinkSpec) -> str:
    if link.bits_per_second >= 1e15:
        return "nothing that could be measured"
    return (
        f"{8e9 / link.bits_per_second:.3g} s a GB and {1e6 * link.latency_seconds:.3g} µs a message"
    )
