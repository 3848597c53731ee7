"""The functions that the kernel calls on a rank by their names, through ``OnRank`` (ranks)."""

import functools
import os
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from ddpnb.protocol.messages import Checked, RejoinInfo, RunReport, RunSpec, StaleVariable
from ddpnb.protocol.variables import Parcel
from ddpnb.rank import cells, shell, tasks, variables
from ddpnb.rank.engine import RankEngine
from ddpnb.rank.inspect import collective, ddp_steps, replicas, samples, subject
from ddpnb.rank.publisher import Publisher
from ddpnb.rank.training import loop, validation
from ddpnb.rank.training.context import UNNAMED

trained = variables.TrainedModels()


def call(name: str, folder: str, *arguments: Any) -> Any:
    """Call a function by its name, in the notebook's working folder once that has changed.

    Where one of ``ANSWERED`` or ``USERS_CODE`` raises, a ``Failure`` is returned, to be shown.  An
    interrupt ends the user's code alone.
    """
    engine: RankEngine = RankEngine.instance()
    if folder and folder != engine.notebook_folder:  # a cell may have gone elsewhere
        engine.notebook_folder = folder
        with suppress(OSError):  # this host does not have it
            os.chdir(folder)
    if name in PLAIN:
        return PLAIN[name](engine, *arguments)
    try:
        if name in ANSWERED:
            return ANSWERED[name](engine, *arguments)
        with engine.adopted_group.during():
            return cells.interruptible(lambda: USERS_CODE[name](engine, *arguments))
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001  the edge of a call: the notebook shows it
        return cells.failure_of(error, engine)


def form_group(engine: RankEngine, generation: int, is_checked: bool) -> list[StaleVariable]:
    """Form a new process group.  Takes part: every rank.

    Returns:
        This rank's variables that still hold the old group.
    """
    engine.group.join(generation, is_checked=is_checked)
    return variables.stale_variables(engine.shell.user_ns)


# -- training ------------------------------------------------------------------------------


def validate(engine: RankEngine, spec: RunSpec) -> Checked:
    """Check one training before anything trains."""
    checks = engine.group.collective_checks
    cells.warn_again()
    cells.announce(spec.source, engine.shell)
    return validation.validate(
        spec,
        **run_options(engine, spec),
        num_calls=lambda: sum(each or 0 for each in checks.num_calls().values()),
    )


def train(engine: RankEngine, spec: RunSpec, rejoin_info: RejoinInfo | None = None) -> RunReport:
    """Train one run, or join it if the others train it already; report how it went."""
    group = engine.group
    cells.warn_again()
    engine.stop_wanted.clear()  # a late request was for the run before
    first_batch = rejoin_info.first_batch if rejoin_info else 0
    publisher = Publisher(rank=group.rank, run_id=spec.run_id, first_batch=first_batch)
    with closing(publisher), engine.adopted_group.during():
        report = cells.interruptible(
            lambda: loop.run(
                spec,
                **run_options(engine, spec),
                publish=publisher.publish,
                should_stop=engine.stop_wanted.is_set,
                expects_stop=engine.stop_expected.is_set,
                rejoin_info=rejoin_info,
                cancellation=group.cancellation,
                keep=functools.partial(trained.keep, spec),
            )
        )
    return replace(report, num_batches_sent=publisher.num_batches)


def run_options(engine: RankEngine, spec: RunSpec | None) -> dict[str, Any]:
    """Return what a run, or its check, needs of this rank."""
    return {
        "state": engine.group.state(),
        "folder": engine.group.folder,
        "namespace": engine.shell.user_ns,
        "filename": filename_of(spec, engine),
    }


def clean_up(engine: RankEngine) -> None:
    """Free the data of the comparison that has ended, and remove what it has left."""
    tasks.forget()
    engine.stop_expected.clear()
    shutil.rmtree(engine.group.folder / validation.CHECKS, ignore_errors=True)


def give(
    engine: RankEngine, expression: str, namespace: dict[str, Any], path: str, *more: Any
) -> Parcel:
    """Return the value of an expression; a large one in this rank's own file."""
    own = f"{path}-{engine.group.rank}" if path else ""
    return variables.give(expression, namespace, own, *more)


def filename_of(spec: RunSpec | None, engine: RankEngine) -> str:
    """Return a file name for a comparison's cell that IPython shows as ``Cell In[n]``."""
    if spec is None or not spec.cell:
        return UNNAMED
    name: str = engine.shell.compile.cache(spec.source, spec.cell, spec.source)
    return name


PLAIN: dict[str, Callable[..., Any]] = {
    "state": lambda engine: engine.group.state(),
    "form_group": form_group,
    "num_calls": lambda engine: engine.group.collective_checks.num_calls(),
    "run_cell": lambda engine, spec: cells.run_cell(spec, engine),
    "clean_up": clean_up,
}
"""What raises only where ddpnb or a rank has failed."""

ANSWERED: dict[str, Callable[..., Any]] = {
    "complete": lambda engine, *asked: shell.completions(engine.shell, *asked),
    "describe": lambda engine, *asked: shell.description(engine.shell, *asked),
    "train": train,  # which can be interrupted, but for its end
    "push": lambda engine, parcel: variables.take(parcel, engine.shell.user_ns),
    "keep_functions": lambda _, key, parcel: variables.keep_functions(key, parcel),
    "pull_model": lambda engine, run_id, *more: give(
        engine, "model", {"model": trained.of(run_id)}, *more
    ),
}

USERS_CODE: dict[str, Callable[..., Any]] = {
    "validate": validate,
    "measure_compute": lambda engine, spec: (  # on one core, while the others are idle
        validation.measure_compute(spec, **run_options(engine, spec))
        if engine.group.rank == 0
        else None
    ),
    "pull": lambda engine, expression, *more: give(engine, expression, engine.shell.user_ns, *more),
    "digests": lambda engine, names: replicas.replica(
        names, engine.shell.user_ns, rank=engine.group.rank
    ),
    "elements": lambda engine, ranks, *wanted: (
        replicas.elements(engine.shell.user_ns, *wanted) if engine.group.rank in ranks else None
    ),
    "samples": lambda engine, spec: samples.samples(
        spec, engine.group.state(), engine.shell.user_ns
    ),
    "find_inspected": lambda engine, spec: subject.find(spec, **run_options(engine, spec.task)),
    "inspect_ddp": lambda engine, spec: ddp_steps.measure(
        spec, cancellation=engine.group.cancellation, **run_options(engine, spec.task)
    ),
    "show_collective": lambda engine, spec: collective.show(spec, device=engine.group.device),
}
