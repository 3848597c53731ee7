"""Runs a child of the fork server, from its start to its exit.  Runs on the ranks."""

import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, NoReturn

from threadpoolctl import threadpool_limits

from ddpnb.protocol.processes import die_with_parent, process_log

Frame = dict[str, Any]
"""A message that is sent over a pipe as JSON."""

Main = Callable[[Frame, Connection, Path], None]
"""A child's main function: of its settings, its pipe to the fork server, and the run folder."""


def run_child(main: Callable[[], None]) -> NoReturn:
    """Run ``main`` in a child with the signal handlers of a new process, then exit."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        main()
        code = 0
    except SystemExit as exit_request:
        code = exit_request.code if isinstance(exit_request.code, int) else 1
    except BaseException:  # noqa: BLE001  the process exits, and the log has the error
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_started(main: Main, fd: str, folder: str) -> NoReturn:
    """Run ``main`` in a new interpreter, which reads its settings from its pipe, then exit."""
    os.set_inheritable(int(fd), False)
    pipe = Connection(int(fd))
    run_child(lambda: main(json.loads(pipe.recv_bytes()), pipe, Path(folder)))


def run(settings: Frame, pipe: Connection, folder: Path) -> None:
    """Run one rank: an ipyparallel engine in the process group.

    ``settings`` are passed to ``ddpnb.rank.engine.run``, together with the engine's command line.
    """
    die_with_parent()
    environment = settings["environment"]
    # A data-loading process must not destroy the process group that it inherits.  Otherwise it
    # would crash, or wait for threads that exist only in the rank.
    os.register_at_fork(after_in_child=gc.freeze)
    redirect_output(process_log(folder, environment["RANK"]))
    if environment["OMP_NUM_THREADS"] != os.environ.get("OMP_NUM_THREADS"):
        threadpool_limits(settings["num_threads"], "blas")  # numpy has read the variable already
    os.environ.update(environment)
    # The paths of sockets must be short.  TMPDIR may be too long for those of data workers.
    tempfile.tempdir = str(folder)
    get_temp_dir()
    tempfile.tempdir = None
    sys.argv[:] = [""]  # like an interpreter without a script, not the fork server's argv
    leave_debugger_out()
    from ddpnb.rank import calls, engine  # noqa: F401, PLC0415  imports torch, after the controller's fork

    profile = folder / "profile"
    arguments = [
        f"--profile-dir={profile}",
        f"--IPEngine.url_file={profile / 'security/ipcontroller-engine.json'}",
        f"--IPEngine.id={environment['RANK']}",
        "--log-level=ERROR",
        "--IPEngine.enable_nanny=False",  # the fork server handles signals and deaths
        "--IPEngine.max_heartbeat_misses=0",
        "--IPEngine.timeout=120",  # s; many ranks register at once
    ]
    engine.run(settings | {"engine_arguments": arguments}, pipe=pipe, folder=folder)


def leave_debugger_out() -> None:
    """Import ipykernel without debugpy, which takes 0.3 s.  No client can debug a rank."""
    if "ipykernel.debugger" not in sys.modules:
        absent: Any = None  # makes an import raise ImportError
        sys.modules["debugpy"] = absent
        importlib.import_module("ipykernel.debugger")
        del sys.modules["debugpy"]


def redirect_output(path: Path) -> None:
    """Redirect the process's stdout and stderr to a log file, and its stdin to /dev/null."""
    try:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    except FileNotFoundError:  # the kernel says that the run folder was removed
        sys.exit(1)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for source in (log, null):
        if source > 2:
            os.close(source)


if __name__ == "__main__":
    run_started(run, *sys.argv[1:])
