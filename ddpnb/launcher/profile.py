"""ipyparallel's launcher of a profile, as a process that ends with the kernel (kernel's host).

``python -m ddpnb.launcher.profile PROFILE NUM FOLDER WORDS...`` has the launcher start so many
times the program of those words, in place of engines: PBS, LSF, SGE, HTCondor, Slurm or MPI, as the
profile's ``ipcluster_config.py`` says.  It prints whether it could, ends them when its stdin
closes, and then removes the file that the last word names.
"""

import asyncio
import contextlib
import inspect
import json
import logging
import os
import sys
from asyncio import FIRST_COMPLETED
from pathlib import Path
from typing import Any

import ipyparallel as ipp


async def main(profile: str, num: str, folder: str, *words: str) -> None:
    """Start the programs and wait for the kernel."""
    cluster = ipp.Cluster(profile=profile, log_level=logging.WARNING)
    launcher = cluster.engine_launcher_class(
        work_dir=folder,
        parent=cluster,
        log=cluster.log,
        profile_dir=cluster.profile_dir,
        cluster_id=cluster.cluster_id,
        engine_set_id="hosts",
        engine_cmd=list(words),
        engine_args=[],
    )
    try:
        await result_of(launcher.start(int(num)))
    except Exception as error:  # noqa: BLE001  the edge of the process: the kernel shows it
        answer(f"{type(error).__name__}: {error}")
        Path(words[-1]).unlink(missing_ok=True)
        return
    answer(None)
    over = asyncio.Event()
    launcher.on_stop(lambda _: over.set())  # batch systems do not report it
    kernel = asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    await asyncio.wait([asyncio.ensure_future(over.wait()), kernel], return_when=FIRST_COMPLETED)
    Path(words[-1]).unlink(missing_ok=True)  # with keys; the kernel may have been killed
    if over.is_set():
        print(launcher.get_output(remove=True), file=sys.stderr, flush=True)
        os._exit(1)  # the thread that waits for the kernel would go on
    await result_of(launcher.stop())
    launcher.get_output(remove=True)


def answer(error: str | None) -> None:
    """Say whether the programs were started, to a kernel that may have been killed meanwhile."""
    with contextlib.suppress(OSError):
        print(json.dumps(error), flush=True)


async def result_of(answer: Any) -> None:
    """Wait for what some launchers return as a coroutine."""
    if inspect.isawaitable(answer):
        await answer


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
