"""Runs ipyparallel's controller, and kills leftover processes.  Runs in the controller."""

import os
import secrets
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from ipyparallel.controller.app import IPController

from ddpnb.compat.ipyparallel_internals import beat_quickly_at_first
from ddpnb.forkserver.child import Frame, redirect_output, run_started
from ddpnb.protocol.processes import die_with_parent, kill_programs, process_log, remove_folder

QUICK_MILLISECONDS = 25
"""Milliseconds between heartbeats while ranks start.  Engines can register only on a heartbeat."""
QUICK_SECONDS = 10.0
"""Seconds for which the controller sends quick heartbeats."""

LOOK_SECONDS = 2.0
"""Seconds between two looks at the kernel."""
ORPHAN_SECONDS = 10.0
"""Seconds that a fork server has to end all processes after the kernel has ended."""


class LocalController(IPController):  # type: ignore[misc]  # has no type hints
    """A controller with its sockets in the run folder, unless its arguments ask for TCP.

    ipyparallel chooses TCP ports some time before it binds the ports.  If another process took one
    of these ports, the ranks would wait for each other forever.
    """

    def construct_url(self, kind: str, channel: str, index: object = None) -> str:
        """Return a channel's address in the form that ipyparallel's clients and engines use."""
        url = super().construct_url(kind, channel, index)
        if not url.startswith("ipc:"):
            return str(url)
        address, _, port = url.rpartition("-")
        return f"{address}:{port}"

    def init_signal(self) -> None:
        """Let signals kill the controller, so that the fork server reports the signal."""

    def init_hub(self) -> None:
        """Make the hub ignore copies of calls, results and output, which the hub does not store.

        With many ranks, reading these copies would take half of the controller's time.
        """
        super().init_hub()
        unread = dict.fromkeys((b"in", b"out", b"iopub"), lambda *_: None)
        getattr(self.hub, "monitor_handlers", {}).update(unread)


def run(settings: Frame, sentinel: Connection, folder: Path) -> None:
    """Run ipyparallel's controller, and kill all processes that outlive the fork server.

    ``settings`` has the controller's command line.  ``sentinel`` closes when the fork server ends.
    The working directory is the run folder, so ipyparallel cannot find the user's configuration.
    """
    redirect_output(process_log(folder, "controller"))
    threading.Thread(target=end_all_after, args=(sentinel, folder), daemon=True).start()
    os.chdir(folder)
    os.register_at_fork(after_in_child=die_with_parent)  # for the heart monitor's process
    beat_quickly_at_first(QUICK_MILLISECONDS, QUICK_SECONDS)
    # With CurveZMQ, which authenticates and encrypts, ipyparallel would omit the signatures.
    key = f"--Session.key={secrets.token_hex(32)}"
    LocalController.launch_instance([*settings["arguments"], key])


def end_all_after(sentinel: Connection, folder: Path) -> None:
    """Wait until the fork server ends, then kill all processes that it or a cell has started.

    Do the same if the kernel has ended and the fork server, which may be suspended, does not end.
    """
    kernel = psutil.Process(os.getppid()).parent()
    while not sentinel.poll(LOOK_SECONDS):
        if has_ended(kernel) and not sentinel.poll(ORPHAN_SECONDS):
            break
    kill_programs(folder)
    time.sleep(LOOK_SECONDS)
    if has_ended(kernel):  # otherwise the kernel removes the folder
        remove_folder(folder)
    os.killpg(0, signal.SIGKILL)


def has_ended(process: psutil.Process | None) -> bool:
    """Return True if a process has ended, and False if it is unknown."""
    try:
        return process is not None and process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


if __name__ == "__main__":
    run_started(run, *sys.argv[1:])
