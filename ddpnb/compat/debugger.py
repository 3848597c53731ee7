"""Keeps ipykernel's debugger out of a process that ranks share.  Runs in the fork server.

ipykernel 6 imports debugpy together with the kernel.  This takes 0.3 s and prints a warning.
This module does not import the kernel, so the fork server can call it first.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ipykernel

from ddpnb.compat.probe import Probe


@Probe("ipykernel", "the ranks start more slowly and use more memory")
def asks_for_debugger() -> bool:
    """Return True if a kernel can start without its debugger."""
    kernel = Path(ipykernel.__path__[0], "ipkernel.py").read_text()
    return "_is_debugpy_available" in kernel


def leave_debugger_out() -> None:
    """Stop this process's kernel from importing debugpy, because no client can debug a rank."""
    if asks_for_debugger.works:
        absent: Any = ModuleType("ipykernel.debugger")
        absent._is_debugpy_available, absent.Debugger = False, object
        sys.modules.setdefault("ipykernel.debugger", absent)
