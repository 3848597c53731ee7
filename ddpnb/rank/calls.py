"""The functions that the kernel calls on a rank by their names, through ``OnRank`` (ranks)."""

import functools
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.inspection import DataParallelReport, DdpReport, Found, InspectSpec
from ddpnb.protocol.machine import MachineQuery, RankMeasured
from ddpnb.protocol.messages import (
    CellReport,
    CellSpec,
    Checked,
    RankState,
    RejoinInfo,
    RunReport,
    RunSpec,
    StaleVariable,
)
from ddpnb.protocol.notation import parse_strategy
from ddpnb.protocol.replicas import Part, RankReplica, RankSamples, SamplerSpec
from ddpnb.protocol.trace import CollectiveShown, CollectiveSpec
from ddpnb.protocol.variables import Parcel
from ddpnb.rank import cells, failures, variables
from ddpnb.rank.engine import RankEngine
from ddpnb.rank.inspect import (
    collective,
    ddp_steps,
    dp_steps,
    links,
    machine,
    replicas,
    subject,
)
from ddpnb.rank.inspect import samples as sampled
from ddpnb.rank.publisher import Publisher
from ddpnb.rank.shell import completions, description
from ddpnb.rank.stale_variables import stale_variables
from ddpnb.rank.training import loop, validation
from ddpnb.rank.training.context import UNNAMED

received = variables.Received()
trained = variables.TrainedModels()


def or_failure(call: Callable[..., Any]) -> Callable[..., Any]:
    """Have a call return a ``Failure`` where it raises, which the notebook shows."""

    @functools.wraps(call)
    def guarded(*args: Any) -> Any:
        try:
            return call(*args)
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001  the edge of a call: the notebook shows it
            return failures.failure_of(error, this_engine())

    return guarded


def work_in(folder: str) -> None:
    """Follow the notebook to another working folder, where this host has it.

    A cell may work elsewhere: only a change of the notebook's own folder is followed.
    """
    engine = this_engine()
    if folder != engine.notebook_folder:
        engine.notebook_folder = folder
        with suppress(OSError):
            os.chdir(folder)


def state() -> RankState:
    """Return this rank's process, host and device."""
    return this_engine().group.state()


def form_group(generation: int, is_checked: bool) -> list[StaleVariable]:
    """Form a new process group.  Takes part: every rank.

    Returns:
        This rank's variables that still hold the old group.
    """
    engine = this_engine()
    engine.group.join(generation, is_checked=is_checked)
    return stale_variables(engine.shell.user_ns)


def num_calls() -> dict[str, int | None]:
    """Return how many collectives each group has had from here; None: one was interrupted."""
    return this_engine().group.collective_checks.num_calls()


def run_cell(spec: CellSpec) -> CellReport:
    """Run a notebook cell."""
    return cells.run_cell(spec, this_engine())


@or_failure
def complete(source: str, offset: int) -> tuple[str, list[tuple[str, str]]]:
    """Complete a cell's source; see ``shell.completions``."""
    return completions(this_engine().shell, source, offset)


@or_failure
def describe(source: str, offset: int, detail_level: int) -> dict[str, str]:
    """Describe the name at an offset of a cell's source; see ``shell.description``."""
    return description(this_engine().shell, source, offset, detail_level)


@or_failure
def validate(spec: RunSpec) -> Checked:
    """Check one training before anything trains."""
    engine = this_engine()
    trained.begin(spec.comparison)
    cells.warn_again()
    cells.announce(spec.source, engine.shell)
    with engine.adopted_group.during():
        return cells.interruptible(
            lambda: validation.validate(
                spec,
                state=engine.group.state(),
                folder=engine.group.folder,
                namespace=engine.shell.user_ns,
                filename=filename_of(spec, engine),
                cache=engine.data_cache,
                num_calls=lambda: sum(each or 0 for each in num_calls().values()),
            )
        )


@or_failure
def train(spec: RunSpec, rejoin_info: RejoinInfo | None = None) -> RunReport:
    """Train one run, or join it if the others train it already; report how it went."""
    engine = this_engine()
    group = engine.group
    cells.warn_again()
    engine.stop_wanted.clear()  # a late request was for the run before
    first_batch = rejoin_info.first_batch if rejoin_info else 0
    publisher = Publisher(rank=group.rank, run_id=spec.run_id, first_batch=first_batch)
    is_built_in = parse_strategy(spec.strategy).name in STRATEGIES  # then torch calls as it should
    trusting = group.collective_checks.trusting_torch() if is_built_in else nullcontext()
    with closing(publisher), trusting, engine.adopted_group.during(), ExitStack() as opened:
        opened.callback(trained.settle)  # however the evaluation ends
        report = cells.interruptible(
            lambda: loop.run(
                spec,
                state=group.state(),
                folder=group.folder,
                publish=publisher.publish,
                namespace=engine.shell.user_ns,
                should_stop=engine.stop_wanted.is_set,
                expects_stop=engine.stop_expected.is_set if group.peers else None,
                filename=filename_of(spec, engine),
                rejoin_info=rejoin_info,
                cancellation=group.cancellation,
                cache=engine.data_cache,
                keep=functools.partial(trained.keep, spec.strategy, spec.run_id),
            )
        )
    return replace(report, num_batches_sent=publisher.num_batches)


def free_data() -> None:
    """Free the data of the comparison that has ended, and remove the files of its checks."""
    engine = this_engine()
    engine.data_cache.clear()
    engine.stop_expected.clear()
    shutil.rmtree(engine.group.folder / validation.CHECKS, ignore_errors=True)


@or_failure
def measure_links(ranks: tuple[int, ...]) -> list[tuple[int, int, float, float]]:
    """Measure the connections between ranks; see ``links.measure``."""
    engine = this_engine()
    with engine.adopted_group.during():
        return cells.interruptible(lambda: links.measure(ranks, engine.group.device))


@or_failure
def push(parcel: Parcel) -> None:
    """Put the notebook's variables into this rank's namespace."""
    received.take(parcel, this_engine().shell.user_ns)


@or_failure
def keep_functions(key: str, parcel: Parcel) -> None:
    """Keep the functions that a comparison trains."""
    variables.keep_functions(key, parcel)


@or_failure
def pull_model(run_id: str, path: str, classes: Collection[str], num_copies: int) -> Parcel:
    """Return the trained model of a run of the latest comparison."""
    engine = this_engine()
    namespace = {"model": trained.of(run_id)}
    path = f"{path}-{engine.group.rank}" if path else ""
    return variables.give("model", namespace, path=path, classes=classes, num_copies=num_copies)


@or_failure
def pull(expression: str, path: str, classes: Collection[str], num_copies: int) -> Parcel:
    """Return the value of an expression in this rank's namespace; see ``variables.give``."""
    engine = this_engine()
    return cells.interruptible(
        lambda: variables.give(
            expression,
            engine.shell.user_ns,
            path=f"{path}-{engine.group.rank}" if path else "",
            classes=classes,
            num_copies=num_copies,
        )
    )


@or_failure
def digests(names: tuple[str, ...]) -> RankReplica:
    """Return digests of what this rank holds under some names; see ``replicas.replica``."""
    engine = this_engine()
    state = engine.group.state()
    return cells.interruptible(
        lambda: replicas.replica(
            names, engine.shell.user_ns, rank=state.rank, device=torch.device(state.device)
        )
    )


@or_failure
def elements(name: str, part: Part, tensor: str, chunks: tuple[int, ...]) -> NDArray[Any]:
    """Return the values in some chunks of a tensor; see ``replicas.elements``."""
    namespace = this_engine().shell.user_ns
    return cells.interruptible(lambda: replicas.elements(name, part, tensor, chunks, namespace))


@or_failure
def samples(spec: SamplerSpec) -> RankSamples:
    """Return which samples this rank gets; see ``samples.samples``."""
    engine = this_engine()
    state = engine.group.state()
    return cells.interruptible(
        lambda: sampled.samples(
            spec,
            engine.shell.user_ns,
            rank=state.rank,
            num_ranks=state.world_size,
            device=torch.device(state.device),
        )
    )


@or_failure
def find_inspected(spec: InspectSpec) -> Found:
    """Look at the model that is to be inspected, on this rank alone."""
    engine = this_engine()
    state, namespace = engine.group.state(), engine.shell.user_ns
    options = inspected_task(spec, engine)
    return cells.interruptible(lambda: subject.find(spec, state, namespace, **options))


@or_failure
def inspect_ddp(spec: InspectSpec, finds_unused: bool) -> DdpReport:
    """Make the steps of an inspection.  Takes part: every rank."""
    engine = this_engine()
    group = engine.group
    options = inspected_task(spec, engine)
    with group.collective_checks.trusting_torch():
        return cells.interruptible(
            lambda: ddp_steps.measure(
                spec,
                group.state(),
                engine.shell.user_ns,
                finds_unused=finds_unused,
                folder=group.folder,
                cancellation=group.cancellation,
                **options,
            )
        )


@or_failure
def inspect_dp(spec: InspectSpec) -> DataParallelReport | None:
    """Make steps of DataParallel on rank 0; the other ranks rest."""
    engine = this_engine()
    group = engine.group
    if group.rank != 0:
        return None
    options = inspected_task(spec, engine)
    return cells.interruptible(
        lambda: dp_steps.measure(
            spec,
            group.state(),
            engine.shell.user_ns,
            folder=group.folder,
            cancellation=group.cancellation,
            **options,
        )
    )


@or_failure
def show_collective(spec: CollectiveSpec) -> CollectiveShown | None:
    """Run one collective for show.  Takes part: every rank."""
    device = this_engine().group.device
    return cells.interruptible(lambda: collective.show(spec, device=device))


@or_failure
def measure_machine(query: MachineQuery) -> RankMeasured:
    """Measure this rank's device, and what lies between the ranks.  Takes part: every rank."""
    engine = this_engine()
    group = engine.group
    with engine.adopted_group.during():
        return cells.interruptible(
            lambda: machine.measure(
                query, group.state(), group.folder, group.cancellation, engine.shell.user_ns
            )
        )


def inspected_task(spec: InspectSpec, engine: RankEngine) -> dict[str, Any]:
    """Return what the context of an inspected task needs besides."""
    if spec.task is None:
        return {}
    return {"filename": filename_of(spec.task, engine), "cache": engine.data_cache}


def filename_of(spec: RunSpec, engine: RankEngine) -> str:
    """Return a file name for a comparison's cell that IPython shows as ``Cell In[n]``."""
    if not spec.cell:
        return UNNAMED
    name: str = engine.shell.compile.cache(spec.source, spec.cell, spec.source)
    return name


def this_engine() -> RankEngine:
    """Return this process's engine."""
    engine = RankEngine.instance()
    assert isinstance(engine, RankEngine)
    return engine
