"""Uses private parts of torch.  Runs on the ranks.

Names without an underscore are also private if torch's documentation does not list them.
Examples of such names are ``ProcessGroup``'s methods and the dispatcher's operations.
"""

import functools
import json
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.data import dataloader

from ddpnb.compat.probe import Probe

ProcessGroup: Any = dist.ProcessGroup

# -- collectives before they reach the backend ----------------------------------------------


@Probe("torch", "only `--check` can compare the ranks' calls before they run")
def intercepts_collectives() -> bool:
    """Return True if ddpnb can replace ``ProcessGroup``'s methods and the collectives' kernels."""
    if not hasattr(torch.library.Library, "impl") or not hasattr(ProcessGroup, "unbox"):
        return False
    if not hasattr(ProcessGroup, "_get_backend"):
        return False
    ProcessGroup.allreduce = ProcessGroup.allreduce
    below_kernels()
    next_kernel("barrier")
    return True


def has_operation(operation: str, num_tensors: int, root: int | None) -> bool:
    """Return True if torch's dispatcher has a collective with the expected arguments.

    The group must come after ``num_tensors`` other arguments.  ``root`` is the index of the root
    rank among the arguments after the group, or None if the collective has no root.
    """
    try:
        arguments = getattr(torch.ops.c10d, operation).default._schema.arguments
        if not str(arguments[num_tensors].type).endswith("c10d.ProcessGroup"):
            return False
        return root is None or arguments[num_tensors + 1 + root].name == "root_rank"
    except (AttributeError, IndexError):
        return False


def replace_method(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of ``ProcessGroup``, if it exists, by the result of ``make(original)``."""
    if (original := getattr(ProcessGroup, name, None)) is not None:
        setattr(ProcessGroup, name, make(original))


def replace_function(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of ``torch.distributed``, also in torch modules that have imported it."""
    original = getattr(dist, name)
    replacement = functools.wraps(original)(make(original))
    for module_name, module in tuple(sys.modules.items()):
        names = vars(module) if module_name.startswith("torch.") else {}
        if names.get(name) is original:
            names[name] = replacement


@Probe("torch", "the time of a backward pass counts as a part of the forward pass")
def runs_backward_in_one_function() -> bool:
    """Return True if ``backward`` and ``grad`` call one function, which ddpnb can replace."""
    return hasattr(torch.autograd, "_engine_run_backward") and all(
        "_engine_run_backward" in function.__code__.co_names
        for function in (torch.autograd.backward, torch.autograd.grad)
    )


@contextmanager
def replaced_backward(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """In this context, every backward pass calls ``make(original)`` instead of ``original``."""
    if not runs_backward_in_one_function.works:
        yield
        return
    autograd: Any = torch.autograd
    original = autograd._engine_run_backward
    autograd._engine_run_backward = not_compiled(functools.wraps(original)(make(original)))
    try:
        yield
    finally:
        autograd._engine_run_backward = original


_KEY = "ADInplaceOrView"
"""The dispatch key of kernels that run after autograd, even if autograd itself makes the call."""


def below_kernels() -> AbstractContextManager[None]:
    """Return a context manager in which calls skip the kernels that ``add_kernels`` added."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(keys)
    return guard


_libraries: list[Any] = []


def add_kernels(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Make torch's dispatcher call Python functions before the backend's kernels, permanently.

    ``kernels`` maps each operation to a function, which is called with a dispatch key set and the
    operation's arguments.
    """
    library: Any = torch.library.Library("c10d", "IMPL")
    for operation, kernel in kernels.items():
        library.impl(operation, kernel, _KEY, with_keyset=True)
    _libraries.append(library)  # deleting a library removes its kernels


@Probe("torch", "torch.compile traces ddpnb's own code and shows warnings about it")
def skips_frames() -> bool:
    """Return True if ddpnb can exclude a function from torch.compile without importing dynamo."""
    _skip_frames((lambda: None).__code__)
    return True


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a function and the functions that it calls from torch.compile.

    ``torch.compiler.disable`` would take a second to import modules that most ranks never need.
    """
    if skips_frames.works:
        _skip_frames(function.__code__)  # for calls from compiled code
        vars(function)["_torchdynamo_disable"] = True  # for callers that are being compiled
    return function


def _skip_frames(code: CodeType) -> None:
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


def next_kernel(operation: str) -> tuple[Callable[..., Any], Any]:
    """Return what a kernel of ``add_kernels`` needs to call the backend's kernel.

    The function's first argument is the kernel's dispatch key set, restricted (``&``) to the
    returned set.
    """
    redispatch = getattr(torch.ops.c10d, operation).default.redispatch
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.ADInplaceOrView)
    return redispatch, below


def unboxed_work(boxed: Any) -> Any:
    """Return the ``Work`` object in the result of a backend's kernel."""
    work: Any = dist.Work
    return work.unbox(boxed)


def is_sum(how: Any) -> bool:
    """Return True if the second argument of an all-reduce asks for a sum; False if unknown."""
    if isinstance(how, torch.ScriptObject):
        return hasattr(how, "op") and bool(how.op() == dist.ReduceOp.SUM)  # torch 2.8 has no "op"
    return bool(getattr(how, "reduceOp", how) == dist.ReduceOp.SUM)


def wait_for_all(group: Any) -> None:
    """Wait until all ranks of a group have called this.  No listener is notified."""
    group._get_backend(torch.device("cpu")).barrier().wait()


@functools.cache
def lone_group() -> Any:
    """Return a group with only this process, in which calls complete at once."""
    gloo: Any = dist.ProcessGroupGloo
    return gloo(dist.HashStore(), 0, 1, timedelta(minutes=1))


def future_of(work: Any) -> Any:
    """Return a ``Work``'s future.  For gloo's reduce-scatter, a thread completes a new future."""
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
"""Matches an error of gloo: a ``RuntimeError`` that begins with the name of a file of gloo."""
_DIST_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Socket closed|NCCL communicator was aborted"
    r"|remote process exiting prematurely"
)


def reports_lost_peer(error: RuntimeError, text: str) -> bool:
    """Return True if an error of torch says that another rank has ended or aborted a group."""
    if isinstance(error, dist.DistError):
        return _DIST_LOST.search(text) is not None
    return _GLOO_LOST.search(text) is not None


@Probe(
    "torch",
    "ddpnb kills ranks that wait in a collective without end, because gloo cannot end a wait on "
    "this system",
)
def gloo_notices_ends() -> bool:
    """Return True if a wait in gloo ends when the wait's connection ends.

    Gloo's transport over epoll raises an error in each wait.  Gloo's transport over libuv, which
    torch uses on macOS, closes the connection and lets the wait continue (``uv/pair.cc``).
    """
    return hasattr(select, "epoll")


# -- collectives in progress ---------------------------------------------------------------


@Probe(
    "torch",
    "ddpnb cannot detect a rank that waits inside DDP's backward pass. "
    "Interrupt the cell or use --timeout to end the wait",
)
def records_collectives() -> bool:
    """Return True if ddpnb can read the flight recorder and its current entries."""
    for entry in _recorded():
        _is_pending(entry, 0)
        _described(entry)
    return True


def pending_collective(
    since_ns: int, *, seconds_on_gpu: float | None = None
) -> tuple[str, str] | None:
    """Return the oldest collective that began on this rank after ``since_ns`` and has not ended.

    Return its function's name, and its input tensors' types and shapes such as ``"Float [3, 4]"``.
    If ``seconds_on_gpu`` is given, ignore collectives that began less than this number of seconds
    ago, and collectives that the GPU has not started.  With ``TORCH_NCCL_ENABLE_TIMING``, an NCCL
    entry is "scheduled" while the GPU computes earlier work, and then "started"
    (docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html).
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
    # NCCL has a separate flight recorder.
    dump = c10d._dump_nccl_trace_json if is_nccl else c10d._dump_fr_trace_json
    entries: Iterable[dict[str, Any]] = json.loads(dump()).get("entries", ())
    return entries


def _is_pending(entry: dict[str, Any], since_ns: int) -> bool:
    return not entry["retired"] and bool(entry["time_created_ns"] > since_ns)


def _described(entry: dict[str, Any]) -> tuple[str, str]:
    pairs = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    tensor = ", ".join(f"{kind} {size}" for kind, size in pairs)
    return entry["profiling_name"].partition(":")[2], tensor


@Probe("torch", "on GPUs, ddpnb cannot end waits in sub-groups and in cells with `--check`")
def lists_groups() -> bool:
    """Return True if torch lists all process groups of this rank, and the groups' backends."""
    wrapper: Any = torch._C._distributed_c10d._ProcessGroupWrapper
    wrapper.wrapped_pg, ProcessGroup._device_types  # noqa: B018  raise AttributeError
    return isinstance(dist.distributed_c10d._world.pg_names, dict)


def process_groups() -> list[Any]:
    """Return all process groups of this rank, including sub-groups."""
    if lists_groups.works:
        return list(dist.distributed_c10d._world.pg_names)
    return [dist.group.WORLD]


def abortable() -> list[Any]:
    """Return objects whose ``abort`` ends the waits in all groups: in general, their backends.

    In torch 2.11, ``abort`` of the wrapper that ``--check`` puts around a backend does nothing.
    """
    found = []
    for group in process_groups():
        devices = group._device_types if lists_groups.works else ()
        for backend in {group._get_backend(device) for device in devices} or {group}:
            while hasattr(backend, "wrapped_pg"):
                backend = backend.wrapped_pg
            found.append(backend)
    return found


@Probe(
    "torch",
    "dist.is_initialized() returns True even after a cell has called dist.destroy_process_group()",
)
def hides_group() -> bool:
    """Return True if ddpnb can hide the default group from ``torch.distributed``."""
    group: Any = dist.group
    group.WORLD = group.WORLD
    return True


def set_default_group(group: Any) -> Any:
    """Replace the default group (None hides it).  Return the old group, or None on failure."""
    if not hides_group.works:
        return None
    world: Any = dist.group
    earlier, world.WORLD = world.WORLD, group
    return earlier


def group_store() -> Any:
    """Return the store through which the ranks formed the default group."""
    group: Any = dist.group.WORLD
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_default_store()  # torch 2.8 has no other way


# -- training ------------------------------------------------------------------------------


@Probe("torch", "the processes of --data-workers may run for a while after a failed run")
def ends_data_workers() -> bool:
    """Return True if ddpnb can end the processes of a ``DataLoader`` at once."""
    return callable(dataloader._MultiProcessingDataLoaderIter._shutdown_workers)


def end_data_workers(batches: Iterator[Any]) -> None:
    """End the processes of a ``DataLoader``'s iterator now, even if references to it remain."""
    if ends_data_workers.works:
        batches._shutdown_workers()  # type: ignore[attr-defined]


@Probe("torch", "the strategy zero cannot run, because ddpnb cannot move an optimizer's hooks")
def lists_step_hooks() -> bool:
    """Return True if ddpnb can move an optimizer's hooks."""
    # Inspect the code, because creating an optimizer imports 800 modules and takes a second.
    names = {
        *torch.optim.Optimizer.register_step_pre_hook.__code__.co_names,
        *torch.optim.Optimizer.register_step_post_hook.__code__.co_names,
    }
    return {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"} <= names


def take_step_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[Any]]:
    """Remove an optimizer's pre-step hooks and post-step hooks, and return them."""
    held = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    before, after = (list(hooks.values()) for hooks in held)
    for hooks in held:
        hooks.clear()
    return before, after


@Probe("torch", "models of your own class stay in memory if the class leaves hooks on gradients")
def lists_gradient_hooks() -> bool:
    """Return True if ddpnb can remove hooks that run after a gradient is accumulated."""
    code = torch.Tensor.register_post_accumulate_grad_hook.__code__
    return "_post_accumulate_grad_hooks" in code.co_names


def remove_gradient_hooks(model: nn.Module) -> None:
    """Remove hooks that keep a model alive, because Python cannot collect cycles through C++."""
    for parameter in model.parameters() if lists_gradient_hooks.works else ():
        if hooks := parameter._post_accumulate_grad_hooks:
            hooks.clear()


@Probe("torch", "%ddp_check cannot count layers that were frozen when DDP wrapped the model")
def counts_ddp_parameters() -> bool:
    """Return True if ddpnb can read how many parameters DDP averages."""
    return callable(getattr(DistributedDataParallel, "_get_ddp_logging_data", None))


def num_thawed(ddp: DistributedDataParallel) -> int:
    """Return the number of parameters that train, but were frozen when DDP wrapped the model."""
    if not counts_ddp_parameters.works:
        return 0
    ignored = ddp.parameters_to_ignore
    names = [n for n, each in ddp.module.named_parameters() if each.requires_grad]
    known = int(ddp._get_ddp_logging_data().get("num_parameter_tensors", len(names)))
    return max(0, sum(name not in ignored for name in names) - known)
