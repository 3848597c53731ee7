"""Private parts of torch.  (Ranks.)

Names without an underscore that torch's documentation does not list, such as the methods of
``ProcessGroup`` and the operations in the dispatcher, count as private too.
"""

import functools
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.data import dataloader

from ddpnb.compat.probe import Probe

ProcessGroup: Any = dist.ProcessGroup

# -- collectives before they reach the backend ----------------------------------------------


@Probe("torch", "calls are not compared before gloo; `--check` still does it")
def intercepts_collectives() -> bool:
    """Whether methods of ``ProcessGroup`` and kernels of its operations can be replaced."""
    if not hasattr(torch.library.Library, "impl") or not hasattr(ProcessGroup, "unbox"):
        return False
    if not hasattr(ProcessGroup, "_get_backend"):
        return False
    ProcessGroup.allreduce = ProcessGroup.allreduce
    below_kernels()
    next_kernel("barrier")
    return True


def has_operation(operation: str, num_tensors: int, root: int | None) -> bool:
    """Return whether torch's dispatcher has a collective with the arguments expected here.

    ``num_tensors`` arguments come before the group, and ``root`` is the index of the root among
    those after it; None if it has no root.
    """
    try:
        arguments = getattr(torch.ops.c10d, operation).default._schema.arguments
        if not str(arguments[num_tensors].type).endswith("c10d.ProcessGroup"):
            return False
        return root is None or arguments[num_tensors + 1 + root].name == "root_rank"
    except (AttributeError, IndexError):
        return False


def replace_method(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of ``ProcessGroup``, if there is one, by what ``make`` returns for it."""
    if (original := getattr(ProcessGroup, name, None)) is not None:
        setattr(ProcessGroup, name, make(original))


def replace_function(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of ``torch.distributed``, also where torch itself has imported it."""
    original = getattr(dist, name)
    replacement = functools.wraps(original)(make(original))
    for module_name, module in tuple(sys.modules.items()):
        names = vars(module) if module_name.startswith("torch.") else {}
        if names.get(name) is original:
            names[name] = replacement


_KEY = "ADInplaceOrView"
"""The kernels with it run below autograd's, and also in what autograd's own code calls."""


def below_kernels() -> AbstractContextManager[None]:
    """Return a context in which calls bypass the kernels of ``add_kernels``."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(keys)
    return guard


_libraries: list[Any] = []


def add_kernels(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Have torch's dispatcher call Python functions before the backend's own kernels, for good.

    Each stands by its operation, and takes a key set and the arguments of the operation.
    """
    library: Any = torch.library.Library("c10d", "IMPL")
    for operation, kernel in kernels.items():
        library.impl(operation, kernel, _KEY, with_keyset=True)
    _libraries.append(library)  # which removes them where nobody holds it


@Probe("torch", "torch.compile traces into the comparison of collectives, and warns")
def skips_frames() -> bool:
    """Whether torch.compile can be kept from a function, without importing its half of torch."""
    _skip_frames((lambda: None).__code__)
    return True


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile from a function and all that it calls, as ``torch.compiler.disable``.

    That one takes a second, to import what most ranks never need.
    """
    if skips_frames.works:
        _skip_frames(function.__code__)  # where compiled code calls it
        vars(function)["_torchdynamo_disable"] = True  # where code that calls it is compiled
    return function


def _skip_frames(code: CodeType) -> None:
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


def next_kernel(operation: str) -> Callable[..., Any]:
    """Return the function by which a kernel of ``add_kernels`` calls what comes after it."""
    redispatch = getattr(torch.ops.c10d, operation).default.redispatch
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.ADInplaceOrView)
    return lambda keys, *arguments: redispatch(keys & below, *arguments)


def unboxed_work(boxed: Any) -> Any:
    """Return the work that a backend's kernel has returned."""
    work: Any = dist.Work
    return work.unbox(boxed)


def is_sum(how: Any) -> bool:
    """Return whether an all-reduce adds up, from the argument after its tensors."""
    is_boxed = isinstance(how, torch.ScriptObject)
    operation = how.op() if is_boxed else getattr(how, "reduceOp", how)
    return bool(operation == dist.ReduceOp.SUM)


def wait_for_all(group: Any) -> None:
    """Wait, unheard, until all ranks of a group do; takes part: every rank of it."""
    group._get_backend(torch.device("cpu")).barrier().wait()


@functools.cache
def lone_group() -> Any:
    """Return a group of this process alone, whose calls are done at once."""
    gloo: Any = dist.ProcessGroupGloo
    return gloo(dist.HashStore(), 0, 1, timedelta(minutes=1))


def future_of(work: Any) -> Any:
    """Return the future of a backend's work; gloo's reduce-scatter has none, and is waited for."""
    try:
        return work.get_future()
    except RuntimeError:
        done: Any = torch.futures.Future()
        waited = done.then(lambda _: work.wait())
        threading.Thread(target=done.set_result, args=[None], daemon=True).start()
        return waited


_GLOO_LOST = re.compile(
    r"\[[^]]*\bgloo/transport/[^]]*\].*?"
    r"(Connection (closed|reset) by peer|Broken pipe|Socket closed)",
    re.DOTALL,
)
"""Gloo raises a plain ``RuntimeError``, whose text begins with the place in its own source."""
_DIST_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Socket closed|NCCL communicator was aborted"
    r"|remote process exiting prematurely"
)


def reports_lost_peer(error: RuntimeError, text: str) -> bool:
    """Return whether an error of torch says that another rank has gone, or has aborted a group."""
    if isinstance(error, dist.DistError):
        return _DIST_LOST.search(text) is not None
    return _GLOO_LOST.search(text) is not None


# -- collectives in progress ---------------------------------------------------------------


class PendingCollective(NamedTuple):
    """A collective in torch's flight recorder that has begun and not ended."""

    name: str
    """The function of ``torch.distributed``."""
    tensor: str
    """What it sends: ``"Float [3, 4]"``."""


@Probe(
    "torch",
    "a rank that waits inside DDP's backward pass is not detected; "
    "interrupt and --timeout still end its wait",
)
def records_collectives() -> bool:
    """Whether the flight recorder and its entries so far can be read."""
    for entry in _recorded():
        _is_pending(entry, 0)
        _described(entry)
    return True


def pending_collective(
    since_ns: int, *, seconds_on_gpu: float | None = None
) -> PendingCollective | None:
    """Return the oldest collective that has begun on this rank since a time and not ended.

    With ``seconds_on_gpu``, it was begun that long ago, and a GPU is in it.  With
    ``TORCH_NCCL_ENABLE_TIMING`` NCCL's entries have the state "started" once the GPU has come to
    them (docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html): what a GPU still
    computes before keeps an entry "scheduled".
    """
    if not dist.is_initialized() or not records_collectives.works:
        return None
    pending = (entry for entry in _recorded() if _is_pending(entry, since_ns))
    if seconds_on_gpu is not None:
        before = time.time_ns() - seconds_on_gpu * 1e9
        started = (entry for entry in pending if entry["state"] == "started")
        pending = (entry for entry in started if entry["time_created_ns"] < before)
    return next(map(_described, pending), None)


def _recorded() -> Iterable[dict[str, Any]]:
    is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    c10d: Any = torch._C._distributed_c10d
    # NCCL has a recorder of its own.
    dump = c10d._dump_nccl_trace_json if is_nccl else c10d._dump_fr_trace_json
    entries: Iterable[dict[str, Any]] = json.loads(dump()).get("entries", ())
    return entries


def _is_pending(entry: dict[str, Any], since_ns: int) -> bool:
    return not entry["retired"] and bool(entry["time_created_ns"] > since_ns)


def _described(entry: dict[str, Any]) -> PendingCollective:
    pairs = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    tensor = ", ".join(f"{kind} {size}" for kind, size in pairs)
    return PendingCollective(entry["profiling_name"].partition(":")[2], tensor)


@Probe("torch", "on GPUs, waits in sub-groups cannot be ended, only those in the default group")
def lists_groups() -> bool:
    """Whether all process groups of this rank are known."""
    return isinstance(dist.distributed_c10d._world.pg_names, dict)


def process_groups() -> list[Any]:
    """Return all process groups of this rank, including sub-groups."""
    if lists_groups.works:
        return list(dist.distributed_c10d._world.pg_names)
    return [dist.group.WORLD]


@Probe(
    "torch",
    "after dist.destroy_process_group() in a cell, dist.is_initialized() is still True there",
)
def hides_group() -> bool:
    """Whether the default group can be hidden from ``torch.distributed``."""
    group: Any = dist.group
    group.WORLD = group.WORLD
    return True


def set_default_group(group: Any) -> Any:
    """Have a group, or None, be the default one; return the earlier one, None if it cannot be."""
    if not hides_group.works:
        return None
    world: Any = dist.group
    earlier, world.WORLD = world.WORLD, group
    return earlier


def group_store() -> Any:
    """Return the store by which the default group was formed."""
    group: Any = dist.group.WORLD
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_default_store()  # torch 2.8 has no other way


# -- training ------------------------------------------------------------------------------


@Probe("torch", "processes of --data-workers may outlive a failed training for a while")
def ends_data_workers() -> bool:
    """Whether the processes of a ``DataLoader`` can be ended at once."""
    return callable(dataloader._MultiProcessingDataLoaderIter._shutdown_workers)


def end_data_workers(batches: Iterator[Any]) -> None:
    """End the processes of a ``DataLoader``'s iterator now, even if it is still referred to."""
    if ends_data_workers.works:
        batches._shutdown_workers()  # type: ignore[attr-defined]


@Probe("torch", "zero cannot be trained: an optimizer's hooks cannot be read")
def lists_step_hooks() -> bool:
    """Whether an optimizer's hooks can be read."""
    # Looked up in the code: making an optimizer imports 800 modules, which takes a second.
    names = {
        *torch.optim.Optimizer.register_step_pre_hook.__code__.co_names,
        *torch.optim.Optimizer.register_step_post_hook.__code__.co_names,
    }
    return {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"} <= names


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[Any]]:
    """Return an optimizer's hooks before a step, and those after it."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return list(before.values()), list(after.values())
