"""The functions that the kernel calls on a rank by their names, through ``OnRank`` (ranks)."""

import functools
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.inspection import DdpReport, Found, InspectSpec
from ddpnb.protocol.machine import RankMeasured
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
from ddpnb.rank import cells, failures, tasks, variables
from ddpnb.rank.engine import RankEngine
from ddpnb.rank.inspect import (
    collective,
    ddp_steps,
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


def answered(call: Callable[..., Any]) -> Callable[..., Any]:
    """Give a call this rank's engine; where it raises, return a ``Failure`` to show."""

    @functools.wraps(call)
    def guarded(*args: Any) -> Any:
        engine = this_engine()
        try:
            return call(engine, *args)
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001  the edge of a call: the notebook shows it
            return failures.failure_of(error, engine)

    return guarded


def running_users_code(call: Callable[..., Any]) -> Callable[..., Any]:
    """Like ``answered``, for what runs the user's code: an interrupt ends it."""

    @functools.wraps(call)
    def interruptible(engine: RankEngine, *args: Any) -> Any:
        with engine.adopted_group.during():
            return cells.interruptible(lambda: call(engine, *args))

    return answered(interruptible)


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


@answered
def complete(engine: RankEngine, source: str, offset: int) -> tuple[str, list[tuple[str, str]]]:
    """Complete a cell's source; see ``shell.completions``."""
    return completions(engine.shell, source, offset)


@answered
def describe(engine: RankEngine, source: str, offset: int, detail_level: int) -> dict[str, str]:
    """Describe the name at an offset of a cell's source; see ``shell.description``."""
    return description(engine.shell, source, offset, detail_level)


@running_users_code
def validate(engine: RankEngine, spec: RunSpec) -> Checked:
    """Check one training before anything trains."""
    trained.begin(spec.comparison)
    cells.warn_again()
    cells.announce(spec.source, engine.shell)
    return validation.validate(
        spec,
        state=engine.group.state(),
        folder=engine.group.folder,
        namespace=engine.shell.user_ns,
        filename=filename_of(spec, engine),
        num_calls=lambda: sum(each or 0 for each in num_calls().values()),
    )


@answered
def train(engine: RankEngine, spec: RunSpec, rejoin_info: RejoinInfo | None = None) -> RunReport:
    """Train one run, or join it if the others train it already; report how it went."""
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
                expects_stop=engine.stop_expected.is_set,
                filename=filename_of(spec, engine),
                rejoin_info=rejoin_info,
                cancellation=group.cancellation,
                keep=functools.partial(trained.keep, spec.strategy, spec.run_id),
            )
        )
    return replace(report, num_batches_sent=publisher.num_batches)


def clean_up() -> None:
    """Free the data of the comparison that has ended, and remove what it has left."""
    engine = this_engine()
    tasks.forget()
    engine.stop_expected.clear()
    shutil.rmtree(engine.group.folder / validation.CHECKS, ignore_errors=True)


@answered
def push(engine: RankEngine, parcel: Parcel) -> None:
    """Put the notebook's variables into this rank's namespace."""
    received.take(parcel, engine.shell.user_ns)


@answered
def keep_functions(_: RankEngine, key: str, parcel: Parcel) -> None:
    """Keep the functions that a comparison trains."""
    variables.keep_functions(key, parcel)


@running_users_code
def pull(
    engine: RankEngine, expression: str, path: str, classes: Collection[str], num_copies: int
) -> Parcel:
    """Return the value of an expression in this rank's namespace; see ``variables.give``."""
    return variables.give(
        expression,
        engine.shell.user_ns,
        path=f"{path}-{engine.group.rank}" if path else "",
        classes=classes,
        num_copies=num_copies,
    )


@answered
def pull_model(
    engine: RankEngine, run_id: str, path: str, classes: Collection[str], num_copies: int
) -> Parcel:
    """Return the trained model of a run of the latest comparison."""
    return variables.give(
        "model",
        {"model": trained.of(run_id)},
        path=f"{path}-{engine.group.rank}" if path else "",
        classes=classes,
        num_copies=num_copies,
    )


@running_users_code
def digests(engine: RankEngine, names: tuple[str, ...]) -> RankReplica:
    """Return digests of what this rank holds under some names; see ``replicas.replica``."""
    return replicas.replica(names, engine.shell.user_ns, rank=engine.group.rank)


@running_users_code
def elements(
    engine: RankEngine,
    ranks: tuple[int, ...],
    name: str,
    part: Part,
    tensor: str,
    chunks: tuple[int, ...],
) -> NDArray[Any] | None:
    """Return the values in some chunks of a tensor, on some ranks; see ``replicas.elements``."""
    if engine.group.rank not in ranks:
        return None
    return replicas.elements(name, part, tensor, chunks, engine.shell.user_ns)


@running_users_code
def samples(engine: RankEngine, spec: SamplerSpec) -> RankSamples:
    """Return which samples this rank gets; see ``samples.samples``."""
    group = engine.group
    return sampled.samples(
        spec,
        engine.shell.user_ns,
        rank=group.rank,
        num_ranks=group.world_size,
        device=group.device,
    )


@running_users_code
def find_inspected(engine: RankEngine, spec: InspectSpec) -> Found:
    """Look at the model that is to be inspected, on this rank alone."""
    options = inspected_task(spec, engine)
    return subject.find(spec, engine.group.state(), engine.shell.user_ns, **options)


@running_users_code
def inspect_ddp(engine: RankEngine, spec: InspectSpec, finds_unused: bool) -> DdpReport:
    """Make the steps of an inspection.  Takes part: every rank."""
    group = engine.group
    with group.collective_checks.trusting_torch():
        return ddp_steps.measure(
            spec,
            group.state(),
            engine.shell.user_ns,
            finds_unused=finds_unused,
            cancellation=group.cancellation,
            **inspected_task(spec, engine),
        )


@running_users_code
def show_collective(engine: RankEngine, spec: CollectiveSpec) -> CollectiveShown | None:
    """Run one collective for show.  Takes part: every rank."""
    return collective.show(spec, device=engine.group.device)


@running_users_code
def measure_machine(engine: RankEngine) -> RankMeasured:
    """Measure this rank's device, and what lies between the ranks.  Takes part: every rank."""
    group = engine.group
    return machine.measure(group.state(), group.folder, group.cancellation)


def inspected_task(spec: InspectSpec, engine: RankEngine) -> dict[str, Any]:
    """Return what the context of an inspected task needs besides."""
    if spec.task is None:
        return {}
    return {"filename": filename_of(spec.task, engine)}


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
