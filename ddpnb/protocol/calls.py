"""The calls that the kernel makes on ranks: declared here, implemented in ``rank/calls.py``.

A declaration gives the types of a call's arguments and result.  Calling the declaration returns a
``Request``, which the kernel sends to ranks.  ``rank/calls.py`` registers the function that a rank
runs.  So this file imports nothing from ``rank/``, and mypy checks both sides.  (Every process.)
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, final

from numpy.typing import NDArray

from ddpnb.protocol.devices import Compute
from ddpnb.protocol.inspection import CapReport, Found, InspectSpec
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
from ddpnb.protocol.replicas import Part, RankReplica, RankSamples, SamplerSpec
from ddpnb.protocol.trace import CollectiveShown, CollectiveSpec
from ddpnb.protocol.variables import Parcel

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)

registered: dict[str, Callable[..., Any]] = {}
"""The function of each call, by name.  A function takes the notebook's folder and the arguments."""


@final
@dataclass(frozen=True, slots=True)
class Request(Generic[Result_co]):
    """One call with its arguments.  A rank answers with a ``Result_co`` or a ``Failure``."""

    name: str
    arguments: tuple[Any, ...]
    folder: str = ""
    """The rank changes to this folder before the call, unless the folder is empty."""

    def __call__(self) -> Any:
        """Run the call on the rank."""
        return registered[self.name](self.folder, *self.arguments)


@final
class RankCall(Generic[Arguments, Result]):
    """A function that ranks can run: ``RankCall[[argument types], result type](name)``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Arguments.args, **_: Arguments.kwargs) -> Request[Result]:
        """Return the request to run the function with these arguments."""
        return Request(self.name, arguments)


# -- the process group ---------------------------------------------------------------------

state = RankCall[[], RankState]("state")
"""Return a description of the rank's process and device."""
form_group = RankCall[[int, bool], list[StaleVariable]]("form_group")
"""Form a process group, with or without torch's checks.  Return variables that hold old groups."""
num_calls = RankCall[[], dict[str, int | None]]("num_calls")
"""Return the number of collectives that this rank called in each group; None if uncertain."""

# -- cells and variables -------------------------------------------------------------------

run_cell = RankCall[[CellSpec], CellReport]("run_cell")
complete = RankCall[[str, int], tuple[str, list[tuple[str, str]]]]("complete")
"""Complete code at an offset; return the code to replace, and each completion with its kind."""
describe = RankCall[[str, int, int], dict[str, Any]]("describe")
"""Return the output of ``name?`` for the name at an offset, at a level of detail (0 or 1)."""
push = RankCall[[Parcel], None]("push")
"""Put a parcel's variables into the namespace of cells."""
pull = RankCall[[str, str, Collection[str], int], Parcel]("pull")
"""Evaluate an expression and return its value; see ``rank.variables.give``."""
pull_model = RankCall[[str, str, Collection[str], int], Parcel]("pull_model")
"""Return the trained model of a run in a parcel, pickled like the values of ``pull``."""
keep_functions = RankCall[[str, Parcel], None]("keep_functions")
"""Store, under a key, the functions that the user passed to ``ddpnb.compare``."""

# -- training ------------------------------------------------------------------------------

validate = RankCall[[RunSpec], Checked]("validate")
"""Check the settings of a run, before any training starts."""
measure_compute = RankCall[[RunSpec], Compute | None]("measure_compute")
"""Measure a device's time per sample on rank 0; the other ranks return None."""
train = RankCall[[RunSpec, RejoinInfo | None], RunReport]("train")
"""Train one run, or join the run if the other ranks already train it."""
clean_up = RankCall[[], None]("clean_up")
"""Free the data and remove the temporary files of the comparison that has ended."""

# -- looking inside ------------------------------------------------------------------------

digests = RankCall[[Sequence[str]], RankReplica]("digests")
"""Return digests of this rank's variables with these names.  Without names, digest all models."""
elements = RankCall[[Collection[int], str, Part, str, Sequence[int]], NDArray[Any] | None](
    "elements"
)
"""Return some chunks of one tensor on the given ranks, and None on the other ranks."""
samples = RankCall[[SamplerSpec], RankSamples]("samples")
find_inspected = RankCall[[InspectSpec], Found]("find_inspected")
"""Run the inspected model on this rank without communication; return its parameters."""
inspect_ddp = RankCall[[InspectSpec], tuple[CapReport, ...]]("inspect_ddp")
"""Train a copy of the model with DDP for some steps, and measure the steps."""
show_collective = RankCall[[CollectiveSpec], CollectiveShown | None]("show_collective")
"""Run and time a collective and count its bytes; return None if the rank does not take part."""
