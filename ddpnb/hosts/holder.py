"""Runs ipyparallel's launcher in a process that ends when the kernel ends.

``python -m ddpnb.hosts.holder`` lets a launcher start relays instead of engines, through Slurm,
MPI, PBS, LSF, SGE or HTCondor.  ``engines`` or the profile's ``ipcluster_config.py`` chooses the
launcher.  When the standard input of this process closes, the relays end.
Runs on the kernel's host.
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

HOLDER_POLL_SECONDS = 3.0
SLURM = """#!/bin/sh
#SBATCH --job-name=ddpnb --export=ALL --no-kill
#SBATCH --nodes={{n}} --ntasks-per-node=1 --cpus-per-task={num_ranks}
srun --no-kill --nodes={{n}} --mem=0 --cpu-bind=none --mpi=none {{program_and_args}}
"""
"""The Slurm job: each node runs one program on all cores.  The job tolerates lost nodes."""
MPI = ["--map-by", "ppr:1:node", "--bind-to", "none"]
"""MPI's arguments to start one program on each host and to let it use all cores of the host."""


async def main(
    *, profile: str, engines: str, num: int, num_ranks: int, folder: str, words: list[str]
) -> None:
    """Start the relays on ``num`` hosts, and wait until the kernel or the job ends.

    Each host will run ``num_ranks`` ranks.  The launcher writes its batch script into ``folder``.
    ``words`` is the relay's command line.  The last word is the path of the file with keys.
    """
    file = Path(words[-1])
    try:
        launcher = make_launcher(profile, engines, folder, words)
        # One program on each host, unless the profile has its own template or arguments.
        if isinstance(launcher, launchers.SlurmEngineSetLauncher):
            launcher.default_template = SLURM.format(num_ranks=num_ranks)
        elif isinstance(launcher, launchers.MPIEngineSetLauncher):
            launcher.mpi_args = launcher.mpi_args or MPI
        await awaited(launcher.start(num))
        kernel = asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
        ended = asyncio.ensure_future(wait_until_ended(launcher))
        await asyncio.wait([ended, kernel], return_when=FIRST_COMPLETED)
    finally:
        file.unlink(missing_ok=True)  # a killed kernel cannot remove it
    if not ended.done():
        await awaited(launcher.stop())
    print(launcher.get_output(remove=True), file=sys.stderr, flush=True)
    os._exit(ended.done())  # the thread that waits for the kernel would keep the process alive


async def wait_until_ended(launcher: Any) -> None:
    """Wait until the launcher's programs have ended.  For Slurm, call ``squeue`` regularly."""
    over = asyncio.Event()
    launcher.on_stop(lambda _: over.set())
    while not over.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), HOLDER_POLL_SECONDS)
        if isinstance(launcher, launchers.SlurmEngineSetLauncher):
            words = ["squeue", "--noheader", f"--jobs={launcher.job_id}"]
            asked = subprocess.run(words, capture_output=True, check=False)
            if asked.returncode == 0 and not asked.stdout.strip():
                return


def make_launcher(profile: str, engines: str, folder: str, words: list[str]) -> Any:
    """Return the launcher that the profile or ``engines`` names, or raise ValueError."""
    options = {"engines": engines} if engines else {}
    cluster = ipp.Cluster(profile=profile or "default", log_level=logging.WARNING, **options)
    if not engines and "engine_launcher_class" not in cluster.config.get("Cluster", {}):
        raise ValueError(
            f"{cluster.profile_dir}/ipcluster_config.py names no launcher; set "
            "c.Cluster.engine_launcher_class in this file, or add --engines slurm"
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


async def awaited(answer: Any) -> None:
    """Wait for an answer, which some launchers return as a coroutine."""
    if inspect.isawaitable(answer):
        await answer


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
