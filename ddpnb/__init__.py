"""Compare data-parallel training strategies from a notebook.  Runs in the kernel and on the ranks.

In a notebook, ``%load_ext ddpnb`` loads the magics.  The functions of this package do the same
as the magics.  Importing the package imports neither torch nor matplotlib.  Each public name is
imported when the kernel or a rank uses the name for the first time.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ddpnb.protocol.errors import UserError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddpnb.api import (
        advise,
        check,
        compare,
        debug,
        delete,
        details,
        export,
        inspect,
        interrupt,
        last_trace,
        load,
        plot,
        predict,
        pull,
        push,
        restart,
        run_cell,
        run_script,
        runs,
        samples,
        show_collective,
        source,
        start,
        status,
        stop,
        why,
    )
    from ddpnb.rank.publisher import log
    from ddpnb.session.environment import debug_info

__all__ = [
    "UserError",
    "advise",
    "check",
    "compare",
    "debug",
    "debug_info",
    "delete",
    "details",
    "export",
    "inspect",
    "interrupt",
    "last_trace",
    "load",
    "log",
    "plot",
    "predict",
    "pull",
    "push",
    "restart",
    "run_cell",
    "run_script",
    "runs",
    "samples",
    "show_collective",
    "source",
    "start",
    "status",
    "stop",
    "why",
]


def __getattr__(name: str) -> Any:
    """Import a public name that the kernel or a rank uses for the first time (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'ddpnb' has no attribute {name!r}")
    engine = sys.modules.get("ddpnb.rank.engine")
    on_rank = engine is not None and engine.RankEngine.initialized()
    if name == "log" and not on_rank:
        raise UserError("ddpnb.log works only on the ranks. Call it in a %%ddp --name NAME cell.")
    if name != "log" and on_rank:
        raise UserError(f"ddpnb.{name} works only in the notebook. Call it without %%ddp.")
    if on_rank:
        return importlib.import_module("ddpnb.rank.publisher").log
    if name == "debug_info":
        return importlib.import_module("ddpnb.session.environment").debug_info
    _check_versions()
    return getattr(importlib.import_module("ddpnb.api"), name)


def __dir__() -> list[str]:
    return __all__


def _check_versions() -> None:
    """Raise UserError if a library is too old.  A test compares the versions with pyproject."""
    if sentence := importlib.import_module("ddpnb.compat.probe").too_old():
        raise UserError(sentence)


def load_ipython_extension(shell: "InteractiveShell | None") -> None:
    """Register the magics: ``%load_ext ddpnb``."""
    _check_versions()
    if shell is None:  # get_ipython() in a script
        raise UserError("Magics need IPython. In a script, call functions such as ddpnb.start(2).")
    importlib.import_module("ddpnb.magics.magics").load(shell)


def unload_ipython_extension(shell: "InteractiveShell") -> None:
    """Stop the cluster: ``%unload_ext ddpnb``."""
    importlib.import_module("ddpnb.magics.magics").unload(shell)
