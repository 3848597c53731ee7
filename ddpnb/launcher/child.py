"""What does a child of the fork server do, from its fork to its exit?  (Its process.)

Nothing here imports torch before a rank's own time: the controller is forked first.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from ddpnb.launcher import controller
from ddpnb.protocol.processes import die_with_parent

Frame = dict[str, Any]
"""What is said over a pipe, as JSON."""


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


def redirect_output(path: Path) -> None:
    """Send the process's stdout and stderr to a log file and its stdin to nothing."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for source in (log, null):
        if source > 2:
            os.close(source)


def run_controller(arguments: list[str], sentinel: Connection, folder: Path) -> None:
    """Be ipyparallel's controller, and see to it that nothing outlives the fork server.

    Ranks die with it at once, wherever they are; this process lives a moment longer.
    """
    redirect_output(folder / "controller.log")
    threading.Thread(target=end_all_after, args=(sentinel,), daemon=True).start()
    controller.run(arguments, folder, in_each_child=die_with_parent)


def end_all_after(sentinel: Connection) -> None:
    """Wait for the fork server's end; then kill its process group, what cells started included."""
    with contextlib.suppress(EOFError, OSError):
        sentinel.recv_bytes()
    os.killpg(0, signal.SIGKILL)


def run_rank(
    rank: int, environment: dict[str, str], settings: Frame, pipe: Connection, folder: Path
) -> None:
    """Be one rank: an ipyparallel engine that has joined the process group."""
    die_with_parent()
    redirect_output(folder / f"rank-{rank}.log")
    os.environ.update(environment)
    sys.argv[:] = [""]  # as in an interpreter that runs no script, not the fork server's
    from ddpnb.rank import engine  # noqa: PLC0415  torch is imported here, after the controller's fork

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
    process.returncode = 0  # reaped by on_sigchld: keeps Popen from warning or waiting
    return process.pid


def spawned_rank(description: str) -> NoReturn:
    """Be the process that ``spawn_rank`` started."""
    request = json.loads(description)
    pipe = Connection(request.pop("pipe"))
    folder = Path(request.pop("folder"))
    run_child(lambda: run_rank(**request, pipe=pipe, folder=folder))
