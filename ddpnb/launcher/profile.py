"""ipyparallel's launcher of a profile, as a process that ends with the kernel (kernel's host).

``python -m ddpnb.launcher.profile PROFILE NUM FOLDER WORDS...`` has the launcher start so many
times the program of those words, in place of engines: PBS, LSF, SGE, HTCondor, Slurm or MPI, as the
profile's ``ipcluster_config.py`` says.  It prints what it did, and ends it when its stdin closes.
"""

import asyncio
import inspect
import json
import logging
import sys
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
        print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
        return
    print(json.dumps(None), flush=True)
    try:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    finally:
        await result_of(launcher.stop())
        launcher.get_output(remove=True)


async def result_of(answer: Any) -> None:
    """Wait for what some launchers return as a coroutine."""
    if inspect.isawaitable(answer):
        await answer


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
