"""ipyparallel's launcher, as a process that ends with the kernel (kernel's host).

``python -m ddpnb.hosts.holder`` has a launcher start relays in place of engines: by Slurm, MPI,
PBS, LSF, SGE or HTCondor, as its argument and the profile's ``ipcluster_config.py`` say.  It ends
them when its standard input closes.  Its standard error has what went wrong.
"""

import asyncio
import contextlib
import inspect
import json
import logging
import os
import subprocess
import sys
from asyncio import FIRST_COMPLETED
from pathlib import Path
from typing import Any

import ipyparallel as ipp
from ipyparallel.cluster import launcher as launchers

POLL_SECONDS = 3.0
SLURM = """#!/bin/sh
#SBATCH --job-name=ddpnb --export=ALL --no-kill
#SBATCH --nodes={{n}} --ntasks-per-node=1 --cpus-per-task={num_ranks}
srun --no-kill --nodes={{n}} --mem=0 --cpu-bind=none --mpi=none {{program_and_args}}
"""
"""One program on each node, which may use all that the job has there; it outlives other nodes."""
MPI = ["--map-by", "ppr:1:node", "--bind-to", "none"]
"""One program on each host, which may use all of its cores."""


async def main(
    *, profile: str, engines: str, num: int, num_ranks: int, folder: str, words: list[str]
) -> None:
    """Start the relays on ``num`` hosts and wait for the kernel.

    ``num_ranks`` are to be on each.  The launcher writes its batch script into ``folder``.
    ``words`` are the relay's command line; the last one is the file with keys.
    """
    file = Path(words[-1])
    try:
        launcher = make_launcher(profile, engines, folder, words)
        # One program on each host, unless the profile says how.
        if isinstance(launcher, launchers.SlurmEngineSetLauncher):
            launcher.default_template = SLURM.format(num_ranks=num_ranks)
        elif isinstance(launcher, launchers.MPIEngineSetLauncher):
            launcher.mpi_args = launcher.mpi_args or MPI
        await result_of(launcher.start(num))
        kernel = asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
        ended = asyncio.ensure_future(end_of(launcher))
        await asyncio.wait([ended, kernel], return_when=FIRST_COMPLETED)
    finally:
        file.unlink(missing_ok=True)  # the kernel may have been killed
    if not ended.done():
        await result_of(launcher.stop())
    print(launcher.get_output(remove=True), file=sys.stderr, flush=True)
    os._exit(ended.done())  # the thread that waits for the kernel would go on


async def end_of(launcher: Any) -> None:
    """Wait until what a launcher has started has ended; of batch systems, Slurm is asked."""
    over = asyncio.Event()
    launcher.on_stop(lambda _: over.set())
    while not over.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), POLL_SECONDS)
        if isinstance(launcher, launchers.SlurmEngineSetLauncher):
            words = ["squeue", "--noheader", f"--jobs={launcher.job_id}"]
            asked = subprocess.run(words, capture_output=True, check=False)
            if asked.returncode == 0 and not asked.stdout.strip():
                return


def make_launcher(profile: str, engines: str, folder: str, words: list[str]) -> Any:
    """Return ipyparallel's launcher; raises ValueError where nothing says which."""
    options = {"engines": engines} if engines else {}
    cluster = ipp.Cluster(profile=profile or "default", log_level=logging.WARNING, **options)
    if not engines and "engine_launcher_class" not in cluster.config.get("Cluster", {}):
        raise ValueError(
            f"{cluster.profile_dir}/ipcluster_config.py names no launcher: set "
            "c.Cluster.engine_launcher_class there, or add --engines slurm"
        )
    return cluster.engine_launcher_class(
        work_dir=folder,
        parent=cluster,
        log=cluster.log,
        profile_dir=cluster.profile_dir,
        cluster_id=cluster.cluster_id,
        engine_set_id="hosts",
        engine_cmd=words,
        engine_args=[],
    )


async def result_of(answer: Any) -> None:
    """Wait for what some launchers return as a coroutine."""
    if inspect.isawaitable(answer):
        await answer


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
