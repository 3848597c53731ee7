"""The functions that the notebook's kernel may call on a rank (ranks).

The kernel calls each public function by its name, through ``ddpnb.protocol.messages.OnRank``.
"""

import copy
import pickle
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from ipyparallel.serialize import deserialize_object, serialize_object
from torch import Tensor

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.messages import (
    CellReport,
    CellSpec,
    Checked,
    Failure,
    RankState,
    RejoinInfo,
    RunReport,
    RunSpec,
    StaleVariable,
)
from ddpnb.protocol.notation import parse_strategy
from ddpnb.rank import cells
from ddpnb.rank.engine import RankEngine
from ddpnb.rank.failures import failure_of
from ddpnb.rank.process_group import Group
from ddpnb.rank.publisher import Publisher
from ddpnb.rank.stale_groups import stale_variables
from ddpnb.rank.training import loop


def state() -> RankState:
    """Return this rank's process, host and device."""
    return this_engine().group.state()


def rejoin(generation: int, is_checked: bool) -> list[StaleVariable]:
    """Form a new process group.  Takes part: every rank.

    Returns:
        This rank's variables that still hold the old group.
    """
    engine = this_engine()
    engine.group.join(generation, is_checked=is_checked)
    return stale_variables(engine.kernel.shell.user_ns)


def run_cell(spec: CellSpec) -> CellReport:
    """Run a notebook cell."""
    return cells.run_cell(spec, this_engine())


def check(spec: RunSpec) -> Failure | Checked:
    """Check one training before anything trains."""
    engine = this_engine()
    try:
        return cells.interruptible(
            lambda: loop.check(
                spec,
                state=engine.group.state(),
                namespace=engine.kernel.shell.user_ns,
                filename=filename_of(spec, engine),
            )
        )
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001  the notebook shows it
        return failure_of(error, engine)


def train(spec: RunSpec, rejoin_info: RejoinInfo | None = None) -> RunReport | Failure:
    """Train one run, or join it if the others train it already; report how it went."""
    engine = this_engine()
    group = engine.group
    engine.stop_wanted.clear()  # a late request was for the run before
    try:
        first_batch = rejoin_info.first_batch if rejoin_info else 0
        with (
            Publisher(rank=group.rank, run_id=spec.run_id, first_batch=first_batch) as publisher,
            trusted(spec, group),
        ):
            report = cells.interruptible(
                lambda: loop.run(
                    spec,
                    state=group.state(),
                    folder=group.folder,
                    publish=publisher.publish,
                    namespace=engine.kernel.shell.user_ns,
                    should_stop=engine.stop_wanted.is_set,
                    filename=filename_of(spec, engine),
                    rejoin_info=rejoin_info,
                    cancellation=group.cancellation,
                )
            )
        return replace(report, num_batches_sent=publisher.num_batches)
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001  the notebook shows it
        return failure_of(error, engine)


def push(variables: bytes) -> Failure | None:
    """Put packed variables into this rank's namespace; return how it failed, if it did."""
    engine = this_engine()
    shell = engine.kernel.shell
    try:
        unpacked, _ = deserialize_object(pickle.loads(variables), shell.user_ns)
        shell.push(unpacked)
    except Exception as error:  # noqa: BLE001  the notebook shows it
        return failure_of(error, engine)
    return None


def pull(expression: str) -> bytes | Failure:
    """Return the packed value of an expression in this rank's namespace, or how it failed.

    Tensors, also those in lists, tuples and dicts, are copied from the GPU: the kernel would have
    to start CUDA to unpack them.
    """
    engine = this_engine()
    try:
        value = eval(expression, engine.kernel.shell.user_ns)
        if engine.group.device.type == "cuda":
            value = on_cpu(value)
        buffers = serialize_object([value], buffer_threshold=0)
        return pickle.dumps(
            [bytearray(buffer) for buffer in buffers]
        )  # arrays are writable on arrival
    except Exception as error:  # noqa: BLE001  the notebook shows it
        return failure_of(error, engine)


def on_cpu(value: object) -> object:
    """Return a value with its tensors, also those in lists, tuples and dicts, on the CPU."""
    match value:
        case Tensor():
            return value.cpu()
        case dict():
            copied = copy.copy(value)  # keeps its class, as of a state_dict
            copied.update((key, on_cpu(item)) for key, item in value.items())
            return copied
        case tuple() if hasattr(value, "_make"):  # a named tuple
            return value._make(map(on_cpu, value))
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(map(on_cpu, value))
    return value


def trusted(spec: RunSpec, group: Group) -> AbstractContextManager[None]:
    """Return the context for a training: strategies of ddpnb's own need not be watched closely."""
    if parse_strategy(spec.strategy).name in STRATEGIES:
        return group.collective_checks.trusting_torch()
    return nullcontext()


def filename_of(spec: RunSpec, engine: RankEngine) -> str:
    """Return a file name for a comparison's cell that IPython shows as ``Cell In[n]``."""
    if not spec.cell:
        return loop.UNNAMED
    name: str = engine.kernel.shell.compile.cache(spec.source, spec.cell, spec.source)
    return name


def this_engine() -> RankEngine:
    """Return this process's engine."""
    engine = RankEngine.instance()
    assert isinstance(engine, RankEngine)
    return engine
