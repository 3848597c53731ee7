"""Lets a rank run code and scripts that were written for torchrun.  Runs on the ranks.

Code for torchrun forms the default process group and destroys the group at the end.  On a rank,
ddpnb has already formed a default group, and ``init_process_group`` uses this group.
``destroy_process_group`` only hides the group until the code forms a group again or the cell ends.
So neither function waits for other ranks, and ddpnb can still abort and replace the group.  Each
script runs in a private ``__main__`` module.
"""

import contextlib
import functools
import importlib.util
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.launcher.api import elastic_launch  # torchrun's and accelerate's

from ddpnb.compat import torch_internals
from ddpnb.protocol.cell_messages import Script
from ddpnb.protocol.errors import UserError
from ddpnb.rank.group import Group
from ddpnb.rank.random_state import preserve_globals, seed_everything

LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
UNNAMED = (None, "", "undefined", -1)
"""If an argument of ``init_process_group`` has one of these values, torch chooses the setting."""

INSTALLED = f"{os.sep}site-packages{os.sep}"

_scripts_modules: set[str] = set()
"""Names of the modules that the last script has imported from the script's folder."""


def refuse_launchers(num_ranks: int) -> None:
    """Make the launchers of Lightning and accelerate raise ``UserError`` on a rank.

    Processes that such a launcher starts would wait for each other forever.  Other code can still
    start processes.
    """
    processes: Any = torch.multiprocessing
    start = processes.start_processes

    def refuse(*_: Any) -> Any:
        raise UserError(
            "A launcher cannot start processes inside a rank. With Lightning, use "
            f'strategy="ddp", devices={num_ranks}. Without Lightning, call the training function '
            "directly, on all ranks."
        )

    @functools.wraps(start)
    def start_processes(*args: Any, **options: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return refuse() if caller in LIGHTNING else start(*args, **options)

    processes.start_processes = start_processes
    elastic_launch.__call__ = refuse  # type: ignore[method-assign]


_hidden: list[Any] = []
"""The default group while it is hidden; empty if it is visible."""


def adopt(group: Group) -> None:
    """Give the user's code the cluster's default group, instead of a new group, in every module."""
    pid = os.getpid()  # a forked process is no rank

    def adopted_init(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def init_process_group(*args: Any, **options: Any) -> Any:
            is_formed = dist.is_initialized() or _hidden
            if not is_formed or os.getpid() != pid:
                return original(*args, **options)
            _check(signature.bind(*args, **options).arguments, group)
            show_group()
            return None

        return init_process_group

    def adopted_destroy(original: Callable[..., Any]) -> Callable[..., Any]:
        def destroy_process_group(group: Any = None) -> None:
            default = dist.group.WORLD
            is_default = default is not None and (group is None or group is default)
            if not is_default or os.getpid() != pid:
                original(group)
                return
            for each in torch_internals.process_groups():
                if each is not default:
                    original(each)
            _hidden.append(default)  # first, because an interrupt may come before the next line
            torch_internals.set_default_group(None)

        return destroy_process_group

    torch_internals.replace_function("init_process_group", adopted_init)
    torch_internals.replace_function("destroy_process_group", adopted_destroy)


def show_group() -> None:
    """Show a hidden group again.  Call this function when the user's code has ended."""
    if _hidden:
        torch_internals.set_default_group(_hidden[0])
        _hidden.clear()


def _check(asked: dict[str, Any], group: Group) -> None:
    """Raise ``UserError`` if ``init_process_group`` asks for another backend, size or rank."""
    if (backend := asked.get("backend")) not in UNNAMED:
        asked["backend"] = backend_on(group.device.type, str(backend))
    for name in ("backend", "world_size", "rank"):
        given, own = asked.get(name), getattr(group, name)
        if given not in (*UNNAMED, own):
            raise UserError(
                f"init_process_group asks for {name} {given}, but the cluster's group has "
                f"{name} {own}. Change the argument or remove it."
            )


def backend_on(device: str, backend: str) -> str:
    """Return a device's backend from a string such as ``"cpu:gloo,cuda:nccl"``."""
    pairs = [part.partition(":") for part in backend.lower().split(",")]
    return {kind: name or kind for kind, _, name in pairs}.get(device, pairs[0][0])


@contextlib.contextmanager
def process_of(script: Script, device: torch.device) -> Iterator[None]:
    """Return a context that runs a script in a private ``__main__``.

    The end of the context restores ``sys.argv``, ``sys.path``, the working folder and, unless later
    cells see the script's variables, all global settings.  The next script imports modules from the
    script's folder again, because the user may have edited these modules.  Enter and leave the
    context while SIGINT is ignored.  Otherwise an interrupt could prevent the context from undoing
    some of the changes.
    """
    main, argv, path, cwd = sys.modules["__main__"], sys.argv[:], sys.path[:], Path.cwd()
    folder = Path(script.path).resolve().parent if script.path else cwd
    _forget_modules()
    before = set(sys.modules)
    with preserve_globals(device, is_fresh=True, keeps_changes=script.keeps_variables):
        sys.modules["__main__"] = ModuleType("__main__")
        sys.argv[:] = [script.name, *script.arguments]
        sys.path[:] = [str(folder), *filter(None, sys.path)]
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                file = getattr(sys.modules[name], "__file__", None) or ""
                is_own = file.startswith(f"{folder}{os.sep}") and INSTALLED not in file
                if is_own and file.endswith(".py"):
                    _scripts_modules.add(name)
            if not script.keeps_variables:  # kept variables may be objects of the modules' classes
                _forget_modules()
            sys.modules["__main__"] = main
            sys.argv[:], sys.path[:] = argv, path
            with contextlib.suppress(OSError):  # the script may have removed the folder
                os.chdir(cwd)


def run_script(script: Script, source: str, *, namespace: dict[str, Any]) -> None:
    """Run a script or a module inside the context of ``process_of``.

    If ``script.keeps_variables`` is True, the script's variables are copied to ``namespace``.

    Raises:
        SystemExit: if the script ends with an exit code other than 0.
        UserError: if the module does not exist.
    """
    seed_everything(None)
    if not script.path and importlib.util.find_spec(script.name) is None:
        raise UserError(f"This rank cannot find the module {script.name}.")
    main = sys.modules["__main__"]
    try:
        if not script.path:
            vars(main).update(runpy.run_module(script.name, run_name="__main__", alter_sys=True))
        else:
            main.__file__ = script.path
            exec(compile(source, script.path, "exec", dont_inherit=True), vars(main))
    except SystemExit as end:
        if end.code not in (None, 0):
            status = end.code if isinstance(end.code, int) else f"1: {end.code}"
            raise SystemExit(f"{script.name} ended with exit code {status}") from None
    finally:
        if script.keeps_variables:
            names = {name for name in vars(main) if not name.startswith("__")}
            namespace.update((name, vars(main)[name]) for name in names)


def _forget_modules() -> None:
    while _scripts_modules:
        sys.modules.pop(_scripts_modules.pop(), None)
