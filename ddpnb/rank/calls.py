"""The calls that the kernel makes on ranks.  Runs on the ranks."""

import functools
import os
import shutil
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, final

from IPython.core.interactiveshell import ExecutionInfo
from numpy.typing import NDArray

from ddpnb.compat.ipykernel_internals import streams
from ddpnb.protocol.cell_messages import CellReport, CellSpec, StaleVariable
from ddpnb.protocol.devices import Compute
from ddpnb.protocol.inspection import (
    CapReport,
    InspectSpec,
    Part,
    RankReplica,
    RankSamples,
    SamplerSpec,
)
from ddpnb.protocol.messages import Checked, RankState, RejoinInfo, RunReport, RunSpec
from ddpnb.protocol.trace import CollectiveShown, CollectiveSpec
from ddpnb.protocol.variables import Parcel
from ddpnb.rank import cells, shell, tasks, variables
from ddpnb.rank.engine import RankEngine
from ddpnb.rank.inspection import collective, ddp_steps, digests, samplers
from ddpnb.rank.publisher import Publisher
from ddpnb.rank.torchrun import show_group
from ddpnb.rank.training import loop, validation
from ddpnb.rank.training.run import Surroundings

RAISES = {"state", "form_group", "num_calls", "clean_up"}
"""Calls that raise their exceptions, because only a mistake in ddpnb can cause these exceptions.
All other calls return a ``Failure``."""
USES_DEVICE = {"measure_compute", "find_inspected", "inspect_ddp", "show_collective", "validate"}
"""Calls that run the user's code, so an interrupt can end the call.  They free GPU memory."""
RUNS_USERS_CODE = USES_DEVICE | {"pull", "digests", "elements", "samples"}


def carry_out(name: str, arguments: Sequence[Any], folder: str) -> Any:
    """Run a call, and return its result or a ``Failure`` that describes its exception.

    If the notebook's working folder has changed, the rank changes to the new folder first.
    """
    engine: RankEngine = RankEngine.instance()
    if folder and folder != engine.notebook_folder:  # otherwise keep a cell's os.chdir
        engine.notebook_folder = folder
        with suppress(OSError):  # this host may not have the folder
            os.chdir(folder)
    call = functools.partial(getattr(RankApi(engine), name), *arguments)
    try:
        return cells.interruptible(call) if name in RUNS_USERS_CODE else call()
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # the notebook shows it
        if name in RAISES:
            raise
        return cells.failure_of(error, engine)
    finally:  # the call's frames have ended, so they hold no model any more
        for stream in streams():
            stream.end_call()
        show_group()
        if name in USES_DEVICE or name == "train":
            engine.shell.InteractiveTB.tb = None  # IPython keeps the latest traceback
            loop.release_memory(engine.group.device)


@final
class RankApi:
    """The calls.  The kernel makes a request with ``protocol.calls``."""

    def __init__(self, engine: RankEngine) -> None:
        self._engine = engine
        self._group = engine.group
        self._variables = engine.shell.user_ns

    # -- the process group -----------------------------------------------------------------

    def state(self) -> RankState:
        """Return a description of the rank's process and device."""
        return self._group.state()

    def form_group(self, generation: int, is_checked: bool) -> list[StaleVariable]:
        """Form a process group with all ranks; return the variables that hold an old group."""
        self._group.join(generation, is_checked=is_checked)
        self._engine.stale = variables.variables_with_group(self._variables)
        return [*self._engine.stale]

    def num_calls(self) -> dict[str, int | None]:
        """Return the number of this rank's collectives in each group; None if uncertain."""
        return self._group.collective_checks.num_calls()

    # -- cells and variables ---------------------------------------------------------------

    def run_cell(self, spec: CellSpec) -> CellReport:
        """Run a cell."""
        return cells.run_cell(spec, self._engine)

    def complete(self, code: str, offset: int) -> tuple[str, list[tuple[str, str]]]:
        """Return the code to replace at an offset, and each completion with its kind."""
        return shell.completions(self._engine.shell, code, offset)

    def describe(self, code: str, offset: int, detail: int) -> dict[str, Any]:
        """Return the output of ``name?`` for the name at an offset.  ``detail`` is 0 or 1."""
        return shell.description(self._engine.shell, code, offset, detail)

    def push(self, parcel: Parcel) -> None:
        """Put a parcel's variables into the namespace of cells."""
        variables.take(parcel, self._variables)

    def pull(self, code: str, path: str, classes: Collection[str], num_copies: int) -> Parcel:
        """Evaluate an expression and return its value; see ``rank.variables.give``."""
        rank = self._group.rank
        return variables.give(rank, self._variables, code, path, classes, num_copies)

    def pull_model(self, run_id: str, path: str, classes: Collection[str], num: int) -> Parcel:
        """Return the trained model of a run, pickled like the values of ``pull``."""
        model = {"model": variables.trained_model(run_id)}
        return variables.give(self._group.rank, model, "model", path, classes, num)

    def keep_functions(self, key: str, parcel: Parcel) -> None:
        """Store, under a key, the functions that the user passed to ``ddpnb.compare``."""
        variables.keep_functions(key, parcel)

    # -- training --------------------------------------------------------------------------

    def validate(self, spec: RunSpec) -> Checked:
        """Check the settings and the code of one run before any strategy trains."""
        checks = self._group.collective_checks
        cells.warn_again()
        about_to_run = ExecutionInfo(spec.source, False, True, True, None)
        self._engine.shell.events.trigger("pre_run_cell", about_to_run)  # e.g. for %autoreload
        return validation.validate(
            spec,
            self._surroundings(spec),
            num_calls=lambda: sum(each or 0 for each in checks.num_calls().values()),
        )

    def measure_compute(self, spec: RunSpec) -> Compute | None:
        """Measure a device's computing speed on rank 0, while the other ranks are idle."""
        if self._group.rank > 0:
            return None
        return validation.measure_compute(spec, self._surroundings(spec))

    def train(self, spec: RunSpec, rejoin_info: RejoinInfo | None) -> RunReport:
        """Train one run, or join a run that other ranks are training."""
        cells.warn_again()
        self._engine.stop_wanted.clear()  # a late request to stop was for the previous run
        first_batch = rejoin_info.first_batch if rejoin_info else 0
        publisher = Publisher(rank=self._group.rank, run_id=spec.run_id, first_batch=first_batch)
        with closing(publisher):
            train = functools.partial(
                loop.train,
                spec,
                replace(self._surroundings(spec), rejoin_info=rejoin_info),
                publish=publisher.publish,
                should_stop=self._engine.stop_wanted.is_set,
                keep=functools.partial(variables.keep_model, spec),
            )
            return cells.interruptible(train)

    def clean_up(self) -> None:
        """Free the data and remove the files of the comparison that has ended."""
        tasks.forget()
        shutil.rmtree(self._group.folder / validation.CHECKS_FOLDER, ignore_errors=True)

    def _surroundings(self, spec: RunSpec | None) -> Surroundings:
        """Return what a run uses of this rank.  Tracebacks name a cell ``Cell In[n]``."""
        group = self._group
        here = Surroundings(
            state=group.state(),
            namespace=self._variables,
            folder=group.folder,
            cancellation=group.cancellation,
        )
        if spec is None or not spec.cell:
            return here
        filename = self._engine.shell.compile.cache(spec.source, spec.cell, spec.source)
        return replace(here, filename=filename)

    # -- looking inside --------------------------------------------------------------------

    def digests(self, names: Sequence[str]) -> RankReplica:
        """Return digests of the variables with these names, or of all models."""
        return digests.replica(names, self._variables, rank=self._group.rank)

    def elements(
        self, ranks: Collection[int], name: str, part: Part, tensor: str, chunks: Sequence[int]
    ) -> NDArray[Any] | None:
        """Return some chunks of one tensor on the given ranks, and None on the other ranks."""
        if self._group.rank not in ranks:
            return None
        return digests.elements(self._variables, name, part, tensor, chunks)

    def samples(self, spec: SamplerSpec) -> RankSamples:
        """Return the indices that a sampler gives to this rank."""
        return samplers.handed_out(spec, self._group.state(), self._variables)

    def find_inspected(
        self, spec: InspectSpec
    ) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
        """Run the inspected model alone; return its parameters' shapes and the unused ones."""
        return ddp_steps.check_model_here(spec, self._surroundings(spec.task))

    def inspect_ddp(self, spec: InspectSpec) -> tuple[CapReport, ...]:
        """Train a copy of the model with DDP for some steps, and measure the steps."""
        return ddp_steps.measure(spec, self._surroundings(spec.task))

    def show_collective(self, spec: CollectiveSpec) -> CollectiveShown | None:
        """Run and time a collective, and count its bytes; None if the rank does not take part."""
        return collective.run_collective(spec, device=self._group.device)
