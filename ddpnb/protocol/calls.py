"""The calls that the kernel makes on ranks: declared here, carried out in ``rank/calls.py``.

A declaration has the types of arguments and result.  The kernel calls it and gets a ``Request``,
which it sends to ranks.  On a rank, ``rank/calls.py`` has registered the function that does it.  So
nothing here imports the ranks' rooms, and mypy compares both sides.  (Every process.)
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
"""What a rank calls with the notebook's folder and the arguments, by name of the declaration."""


@final
@dataclass(frozen=True, slots=True)
class Request(Generic[Result_co]):
    """One call with its arguments; ranks return a ``Result_co``, or a ``Failure``."""

    name: str
    arguments: tuple[Any, ...]
    folder: str = ""
    """The notebook's working folder, where the rank works too; empty: where it is."""

    def __call__(self) -> Any:
        """Carry it out; runs on the rank."""
        return registered[self.name](self.folder, *self.arguments)


@final
class RankCall(Generic[Arguments, Result]):
    """A function that ranks have: ``RankCall[[argument types], result type](name)``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Arguments.args, **_: Arguments.kwargs) -> Request[Result]:
        """Return a request."""
        return Request(self.name, arguments)


# -- the process group ---------------------------------------------------------------------

state = RankCall[[], RankState]("state")
"""Describe the rank's process and device."""
form_group = RankCall[[int, bool], list[StaleVariable]]("form_group")
"""Form the process group of a generation, checked by torch or not; return what holds the old."""
num_calls = RankCall[[], dict[str, int | None]]("num_calls")
"""Return how many collectives each group has had from this rank."""

# -- cells and variables -------------------------------------------------------------------

run_cell = RankCall[[CellSpec], CellReport]("run_cell")
complete = RankCall[[str, int], tuple[str, list[tuple[str, str]]]]("complete")
"""Complete a source at an offset; return what is replaced, and texts with their kinds."""
describe = RankCall[[str, int, int], dict[str, str]]("describe")
"""Return what ``name?`` shows about the name at an offset, with a level of detail; or nothing."""
push = RankCall[[Parcel], None]("push")
"""Put a parcel's variables into the namespace of cells."""
pull = RankCall[[str, str, Collection[str], int], Parcel]("pull")
"""Evaluate an expression; see ``rank.variables.give``."""
pull_model = RankCall[[str, str, Collection[str], int], Parcel]("pull_model")
"""Give the trained model of a run, as ``pull`` does."""
keep_functions = RankCall[[str, Parcel], None]("keep_functions")
"""Keep under a key the functions that ``ddpnb.compare`` was called with."""

# -- training ------------------------------------------------------------------------------

validate = RankCall[[RunSpec], Checked]("validate")
"""Check one training before anything trains."""
measure_compute = RankCall[[RunSpec], Compute | None]("measure_compute")
"""Measure a device's time for a sample, on rank 0 alone; None on the others."""
train = RankCall[[RunSpec, RejoinInfo | None], RunReport]("train")
"""Train one run, or join it if the others train it already."""
clean_up = RankCall[[], None]("clean_up")
"""Free the data of the comparison that has ended, and remove what it has left."""

# -- looking inside ------------------------------------------------------------------------

digests = RankCall[[Sequence[str]], RankReplica]("digests")
"""Return digests of what this rank holds under names; without names, of all models."""
elements = RankCall[[Collection[int], str, Part, str, Sequence[int]], NDArray[Any] | None](
    "elements"
)
"""Return, on some ranks, the values in chunks of a tensor: of a name, its part, its own name."""
samples = RankCall[[SamplerSpec], RankSamples]("samples")
find_inspected = RankCall[[InspectSpec], Found]("find_inspected")
"""Look at the model to inspect, on this rank alone."""
inspect_ddp = RankCall[[InspectSpec], tuple[CapReport, ...]]("inspect_ddp")
"""Make and measure steps of DDP on a copy of the model."""
show_collective = RankCall[[CollectiveSpec], CollectiveShown | None]("show_collective")
"""Run a collective, time it and count its bytes; None where the rank takes no part."""
