"""Runs a script on a rank as if ``torchrun`` had started it (ranks)."""

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

import torch

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Script
from ddpnb.rank.collective_checks import lines_of
from ddpnb.rank.random_state import preserve_globals, seed_everything

INSTALLED = f"{os.sep}site-packages{os.sep}"

_kept_modules: set[str] = set()
"""What the last script has imported from its folder, if its variables were kept."""


def run_script(
    script: Script, source: str, *, namespace: dict[str, Any], device: torch.device
) -> None:
    """Run a script in a ``__main__`` of its own, and restore this process's afterwards.

    Unless its variables are kept, its random numbers and torch's settings are its own, too.

    Args:
        script: what to run, and its arguments.
        source: its text; that of a module is looked up here.
        namespace: takes its variables in the end, if they are to be kept.
        device: this rank's.

    Raises:
        SystemExit: it ended with an exit code other than 0.
        UserError: there is no such module.
    """
    main = ModuleType("__main__")
    restored = nullcontext() if script.keeps_variables else preserve_globals(device)
    with restored, _restored_process(), _as_main(main, script):
        seed_everything(None)
        code = _code_of(script, source, main)
        sys.argv[0] = code.co_filename if script.is_module else script.name
        try:
            with lines_of(code.co_filename):
                exec(code, vars(main))
        except SystemExit as end:
            if end.code not in (None, 0):
                status = end.code if isinstance(end.code, int) else f"1: {end.code}"
                raise SystemExit(f"{script.name} ended with exit code {status}") from None
        finally:
            if script.keeps_variables:
                names = {name for name in vars(main) if not name.startswith("__")}
                namespace.update((name, vars(main)[name]) for name in names)


def _code_of(script: Script, source: str, main: ModuleType) -> CodeType:
    """Return a script's code; note in its module what Python notes there."""
    if not script.is_module:
        main.__file__ = script.path
        return compile(source, script.path, "exec", dont_inherit=True)
    found = _found(script.name)
    code = getattr(found.loader, "get_code", lambda _: None)(found.name) if found else None
    if found is None or code is None:
        raise UserError(f"There is no module {script.name} to run on this rank.")
    main.__spec__, main.__loader__, main.__package__ = found, found.loader, found.parent
    main.__file__ = found.origin
    assert isinstance(code, CodeType)
    return code


def _found(name: str) -> ModuleSpec | None:
    """Return a module, or a package's ``__main__``."""
    try:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            return importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not name.startswith(error.name or name):
            raise  # a package above it imports what is not there
        return None
    return found


@contextlib.contextmanager
def _as_main(main: ModuleType, script: Script) -> Iterator[None]:
    """Return a context in which a module is ``__main__``, and finds others as Python does.

    What it imports from its folder is imported anew by the next script, which may follow an edit.
    """
    folder = Path.cwd() if script.is_module else Path(script.path).resolve().parent
    while _kept_modules:
        sys.modules.pop(_kept_modules.pop(), None)
    before = set(sys.modules)
    sys.modules["__main__"] = main
    sys.argv[:] = [script.name, *script.arguments]
    sys.path[:] = [str(folder), *filter(None, sys.path)]
    try:
        yield
    finally:
        imported = {name for name in set(sys.modules) - before if _is_in(folder, sys.modules[name])}
        if script.keeps_variables:  # which may be objects of its classes
            _kept_modules.update(imported)
            imported.clear()
        for name in imported:
            del sys.modules[name]


def _is_in(folder: Path, module: ModuleType) -> bool:
    """Return whether a module was imported from a file of a user's folder."""
    file = getattr(module, "__file__", None) or ""
    is_users = file.startswith(f"{folder}{os.sep}") and INSTALLED not in file
    return is_users and file.endswith(".py")


@contextlib.contextmanager
def _restored_process() -> Iterator[None]:
    """Restore what a script may change of its process for itself alone.

    ``os._exit`` ends it as ``sys.exit`` does: this process has the notebook's variables too.
    """
    main, argv, path, folder = sys.modules["__main__"], sys.argv[:], sys.path[:], Path.cwd()
    pid, end_process = os.getpid(), os._exit

    def end_script(status: int) -> NoReturn:
        if os.getpid() != pid or threading.current_thread() is not threading.main_thread():
            end_process(status)
        raise SystemExit(status)

    vars(os).update(_exit=end_script)
    try:
        yield
    finally:
        vars(os).update(_exit=end_process)
        sys.modules["__main__"] = main
        sys.argv[:], sys.path[:] = argv, path
        with contextlib.suppress(OSError):  # it has removed the folder
            os.chdir(folder)
