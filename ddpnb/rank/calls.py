"""Implements each call that ``protocol.calls`` declares as one function.  Runs on the ranks."""

import functools
import os
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, Concatenate

from IPython.core.interactiveshell import ExecutionInfo

from ddpnb.protocol import calls
from ddpnb.protocol.calls import Arguments, RankCall, Result
from ddpnb.protocol.messages import Checked, RejoinInfo, RunReport, RunSpec, StaleVariable
from ddpnb.rank import cells, shell, tasks, variables
from ddpnb.rank.engine import RankEngine
from ddpnb.rank.inspect import collective, ddp_steps, replicas, samples, subject
from ddpnb.rank.publisher import Publisher
from ddpnb.rank.training import loop, validation
from ddpnb.rank.training.run import Surroundings

Implementation = Callable[Concatenate[RankEngine, Arguments], Result]


def carries_out(
    declared: RankCall[Arguments, Result],
    *,
    answers: bool = True,
    runs_users_code: bool = False,
    uses_device: bool = False,
) -> Callable[[Implementation[Arguments, Result]], Implementation[Arguments, Result]]:
    """Return a decorator that registers a function as the implementation of a declared call.

    If the notebook's working folder has changed, the rank changes to the new folder before a call.

    Args:
        declared: the call that the function implements.
        answers: if True, exceptions are returned to the notebook as a ``Failure``.  If False,
            exceptions are raised, because only a mistake in ddpnb can cause them.
        runs_users_code: if True, the call runs the user's code, and an interrupt can end the call.
        uses_device: if True, the call computes on the device, and frees the device's memory.
    """

    def register(
        function: Implementation[Arguments, Result],
    ) -> Implementation[Arguments, Result]:
        def carry_out(folder: str, *arguments: Any) -> Any:
            engine: RankEngine = RankEngine.instance()
            if folder and folder != engine.notebook_folder:  # otherwise keep a cell's os.chdir
                engine.notebook_folder = folder
                with suppress(OSError):  # this host may not have the folder
                    os.chdir(folder)
            call: Callable[[], Any] = functools.partial(function, engine, *arguments)
            try:
                return _answer(call, engine, runs_users_code) if answers else call()
            finally:  # the call's frames have ended, so they hold no model any more
                if uses_device:
                    engine.shell.InteractiveTB.tb = None  # IPython keeps the latest traceback
                    loop.release_memory(engine.group.device)

        calls.registered[declared.name] = carry_out
        return function

    return register


def _answer(call: Callable[[], Any], engine: RankEngine, runs_users_code: bool) -> Any:
    """Return the result of a call, or a ``Failure`` that describes the call's exception."""
    try:
        if not runs_users_code:
            return call()
        with engine.adopted_group.during():
            return cells.interruptible(call)
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001  the notebook shows it
        return cells.failure_of(error, engine)


@carries_out(calls.form_group, answers=False)
def form_group(engine: RankEngine, generation: int, is_checked: bool) -> list[StaleVariable]:
    """Form a new process group with all ranks; return the variables that hold an old group."""
    engine.group.join(generation, is_checked=is_checked)
    engine.stale = variables.variables_with_group(engine.shell.user_ns)
    return [*engine.stale]


# -- training ------------------------------------------------------------------------------


@carries_out(calls.validate, runs_users_code=True, uses_device=True)
def validate(engine: RankEngine, spec: RunSpec) -> Checked:
    """Check the settings and the code of one run before any strategy trains."""
    checks = engine.group.collective_checks
    cells.warn_again()
    about_to_run = ExecutionInfo(spec.source, False, True, True, None)
    engine.shell.events.trigger("pre_run_cell", about_to_run)  # e.g. for %autoreload
    return validation.validate(
        spec,
        surroundings_of(engine, spec),
        num_calls=lambda: sum(each or 0 for each in checks.num_calls().values()),
    )


@carries_out(calls.train, uses_device=True)  # the function makes only the training interruptible
def train(engine: RankEngine, spec: RunSpec, rejoin_info: RejoinInfo | None) -> RunReport:
    """Train one run, or join a run that other ranks are training; return this rank's report."""
    group = engine.group
    cells.warn_again()
    engine.stop_wanted.clear()  # a late request to stop was for the previous run
    first_batch = rejoin_info.first_batch if rejoin_info else 0
    publisher = Publisher(rank=group.rank, run_id=spec.run_id, first_batch=first_batch)
    with closing(publisher), engine.adopted_group.during():
        return cells.interruptible(
            lambda: loop.train(
                spec,
                replace(surroundings_of(engine, spec), rejoin_info=rejoin_info),
                publish=publisher.publish,
                should_stop=engine.stop_wanted.is_set,
                keep=functools.partial(variables.keep_model, spec),
            )
        )


def surroundings_of(engine: RankEngine, spec: RunSpec | None) -> Surroundings:
    """Return this rank's state, variables and folder.  Tracebacks call a cell ``Cell In[n]``."""
    group, shell = engine.group, engine.shell
    here = Surroundings(
        state=group.state(),
        namespace=shell.user_ns,
        folder=group.folder,
        cancellation=group.cancellation,
    )
    if spec is None or not spec.cell:
        return here
    filename = shell.compile.cache(spec.source, spec.cell, spec.source)
    return replace(here, filename=filename)


@carries_out(calls.clean_up, answers=False)
def clean_up(engine: RankEngine) -> None:
    """Free the data of the comparison that has ended, and remove the comparison's files."""
    tasks.forget()
    shutil.rmtree(engine.group.folder / validation.CHECKS, ignore_errors=True)


# -- calls with an implementation of one line ----------------------------------------------

carries_out(calls.state, answers=False)(lambda engine: engine.group.state())
carries_out(calls.num_calls, answers=False)(lambda e: e.group.collective_checks.num_calls())
carries_out(calls.run_cell, answers=False)(lambda engine, spec: cells.run_cell(spec, engine))
carries_out(calls.complete)(lambda engine, *asked: shell.completions(engine.shell, *asked))
carries_out(calls.describe)(lambda engine, *asked: shell.description(engine.shell, *asked))
carries_out(calls.push)(lambda engine, parcel: variables.take(parcel, engine.shell.user_ns))
carries_out(calls.keep_functions)(lambda _, key, parcel: variables.keep_functions(key, parcel))
carries_out(calls.pull_model)(
    lambda engine, run_id, *more: variables.give(
        engine.group.rank, {"model": variables.trained_model(run_id)}, "model", *more
    )
)
carries_out(calls.pull, runs_users_code=True)(
    lambda engine, *asked: variables.give(engine.group.rank, engine.shell.user_ns, *asked)
)
carries_out(calls.measure_compute, runs_users_code=True, uses_device=True)(
    lambda engine, spec: (  # on one core, while the other ranks are idle
        validation.measure_compute(spec, surroundings_of(engine, spec))
        if engine.group.rank == 0
        else None
    )
)
carries_out(calls.digests, runs_users_code=True)(
    lambda engine, names: replicas.replica(names, engine.shell.user_ns, rank=engine.group.rank)
)
carries_out(calls.elements, runs_users_code=True)(
    lambda engine, ranks, *wanted: (
        replicas.elements(engine.shell.user_ns, *wanted) if engine.group.rank in ranks else None
    )
)
carries_out(calls.samples, runs_users_code=True)(
    lambda engine, spec: samples.samples(spec, engine.group.state(), engine.shell.user_ns)
)
carries_out(calls.find_inspected, runs_users_code=True, uses_device=True)(
    lambda engine, spec: subject.find(spec, surroundings_of(engine, spec.task))
)
carries_out(calls.inspect_ddp, runs_users_code=True, uses_device=True)(
    lambda engine, spec: ddp_steps.measure(spec, surroundings_of(engine, spec.task))
)
carries_out(calls.show_collective, runs_users_code=True, uses_device=True)(
    lambda engine, spec: collective.show(spec, device=engine.group.device)
)
