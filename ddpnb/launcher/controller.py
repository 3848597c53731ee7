"""What is the controller as a process?  ipyparallel's own, with a quicker start.  (Its process.)"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from ipyparallel.controller.app import IPController

from ddpnb.compat.ipyparallel_internals import beat_quickly_at_first

QUICK_MILLISECONDS = 25
"""Time between heartbeats while ranks are expected: an engine is registered on a heartbeat."""
QUICK_SECONDS = 10.0
"""How long that is."""


def run(arguments: list[str], folder: Path, in_each_child: Callable[[], None]) -> None:
    """Be the controller, in the run folder so that no configuration is picked up.

    Args:
        arguments: ipyparallel's command line.
        folder: the run folder.
        in_each_child: called in the process that the controller forks for its heart monitor.
    """
    os.chdir(folder)
    os.register_at_fork(after_in_child=in_each_child)
    beat_quickly_at_first(QUICK_MILLISECONDS, QUICK_SECONDS)
    # CurveZMQ authenticates and encrypts; ipyparallel would leave out the signatures then.
    key = f"--Session.key={secrets.token_hex(32)}"
    IPController.launch_instance([*arguments, key])
