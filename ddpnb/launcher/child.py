"""A child of the fork server: the controller or a rank, from fork to exit (their processes).

Torch is imported only by a rank: the controller is forked before it.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from ipyparallel.controller.app import IPController

from ddpnb.compat.ipyparallel_internals import beat_quickly_at_first
from ddpnb.protocol.processes import die_with_parent

Frame = dict[str, Any]
"""A message over a pipe, as JSON."""

QUICK_MILLISECONDS = 25
"""Time between heartbeats while ranks are starting: an engine registers on a heartbeat."""
QUICK_SECONDS = 10.0
"""How long that lasts."""


def run_child(main: Callable[[], None]) -> NoReturn:
    """Run ``main`` in a forked child as if it were a fresh process, then exit."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        main()
        code = 0
    except SystemExit as exit_request:
        code = exit_request.code if isinstance(exit_request.code, int) else 1
    except BaseException:  # noqa: BLE001  the edge of the process: the cause goes to its log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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

    Args:
        arguments: ipyparallel's command line.
        sentinel: the pipe that closes with the fork server.
        folder: the run folder; as the working directory it hides the user's configuration.
    """
    redirect_output(folder / "controller.log")
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


def run_rank(
    rank: int, environment: dict[str, str], settings: Frame, pipe: Connection, folder: Path
) -> None:
    """Be one rank: an ipyparallel engine in the process group."""
    die_with_parent()
    redirect_output(folder / f"rank-{rank}.log")
    os.environ.update(environment)
    sys.argv[:] = [""]  # as in an interpreter that runs no script; else the fork server's
    from ddpnb.rank import calls, engine  # noqa: F401, PLC0415  imports torch, after the controller's fork

    engine.run(settings, pipe=pipe, folder=folder)


def spawn_rank(
    rank: int, environment: dict[str, str], settings: Frame, pipe: Connection, folder: Path
) -> int:
    """Start a rank in a fresh interpreter, where forking is not safe; return its pid."""
    description = json.dumps(
        {
            "rank": rank,
            "environment": environment,
            "settings": settings,
            "folder": str(folder),
            "pipe": pipe.fileno(),
        }
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "ddpnb.launcher.forkserver", "--rank", description],
        pass_fds=[pipe.fileno()],
        env=os.environ | environment,
    )
    process.returncode = 0  # on_sigchld reaps it: keeps Popen from warning or waiting
    return process.pid


def run_spawned_rank(description: str) -> NoReturn:
    """Be the process that ``spawn_rank`` started."""
    request = json.loads(description)
    pipe = Connection(request.pop("pipe"))
    folder = Path(request.pop("folder"))
    run_child(lambda: run_rank(**request, pipe=pipe, folder=folder))


def redirect_output(path: Path) -> None:
    """Send the process's stdout and stderr to a log file, and read its stdin from nothing."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for source in (log, null):
        if source > 2:
            os.close(source)
