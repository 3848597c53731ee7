"""The controller as a child of the fork server: it ends what outlives that (controller)."""

import contextlib
import os
import secrets
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from ipyparallel.controller.app import IPController

from ddpnb.compat.ipyparallel_internals import beat_quickly_at_first
from ddpnb.launcher.child import redirect_output
from ddpnb.protocol.processes import die_with_parent, process_log

QUICK_MILLISECONDS = 25
"""Time between heartbeats while ranks are starting: an engine registers on a heartbeat."""
QUICK_SECONDS = 10.0
"""How long that lasts."""


class LocalController(IPController):  # type: ignore[misc]  # has no type hints
    """A controller with its sockets in the run folder, where nothing else is asked for.

    ipyparallel's ports are chosen first and bound later: another process may have taken one by
    then, and the ranks would wait for each other without end.
    """

    def construct_url(self, kind: str, channel: str, index: object = None) -> str:
        """Return the address of a channel, spelled as ipyparallel's clients and engines do."""
        url = super().construct_url(kind, channel, index)
        if not url.startswith("ipc:"):
            return str(url)
        address, _, port = url.rpartition("-")
        return f"{address}:{port}"

    def init_hub(self) -> None:
        """Have the hub read no copies of calls, results and output: it keeps none of them.

        With many ranks, reading them was half of the controller's work.
        """
        super().init_hub()
        unread = dict.fromkeys((b"in", b"out", b"iopub"), lambda *_: None)
        getattr(self.hub, "monitor_handlers", {}).update(unread)


def run_controller(arguments: list[str], sentinel: Connection, folder: Path) -> None:
    """Be ipyparallel's controller, and end what outlives the fork server.

    ``sentinel`` closes with the fork server.  The run folder, as the working directory, hides the
    user's configuration.
    """
    redirect_output(process_log(folder, "controller"))
    threading.Thread(target=end_all_after, args=(sentinel,), daemon=True).start()
    os.chdir(folder)
    os.register_at_fork(after_in_child=die_with_parent)  # the heart monitor's process
    beat_quickly_at_first(QUICK_MILLISECONDS, QUICK_SECONDS)
    # CurveZMQ authenticates and encrypts; with it, ipyparallel would leave out the signatures.
    key = f"--Session.key={secrets.token_hex(32)}"
    LocalController.launch_instance([*arguments, key])


def end_all_after(sentinel: Connection) -> None:
    """Wait for the fork server's end, then kill its process group with all that cells started."""
    with contextlib.suppress(EOFError, OSError):
        sentinel.recv_bytes()
    os.killpg(0, signal.SIGKILL)
