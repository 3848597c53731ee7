"""With which settings are the controller and the ranks started?  (Notebook side.)"""

from pathlib import Path
from typing import Any

from ddpnb.notebook.cluster.plan import Placement

CONTROLLER = (
    "--ip=127.0.0.1",
    "--location=127.0.0.1",
    "--log-level=ERROR",
    "--IPController.enable_curve=True",
    "--IPController.use_threads=True",  # two processes in place of nine
    "--IPController.db_class=ipyparallel.controller.dictdb.NoDB",  # else it keeps every result
    "--HeartMonitor.period=100",  # ms; ranks are registered on a heartbeat
    "--HeartMonitor.max_heartmonitor_misses=864000",  # a day: ends are seen by the fork server
)
ENGINE = (
    "--log-level=ERROR",
    "--IPEngine.enable_nanny=False",  # the fork server sees to signals and deaths
    "--IPEngine.max_heartbeat_misses=0",
)


def controller_arguments(profile: Path) -> list[str]:
    """Return ipyparallel's command line for the controller."""
    return [f"--profile-dir={profile}", *CONTROLLER]


def engine_arguments(profile: Path, rank: int) -> list[str]:
    """Return ipyparallel's command line for a rank's engine."""
    return [
        f"--profile-dir={profile}",
        f"--IPEngine.url_file={profile / 'security/ipcontroller-engine.json'}",
        f"--IPEngine.id={rank}",
        *ENGINE,
    ]


def rank_settings(
    placement: Placement, rank: int, *, profile: Path, home: Path, generation: int | None
) -> dict[str, Any]:
    """Return what a rank's process must know, as ``ddpnb.rank.engine`` takes it.

    Args:
        placement: which rank computes where.
        rank: which one.
        profile: ipyparallel's profile folder.
        home: where cells run at first.
        generation: of the process group that it joins; None for none.
    """
    return {
        "device": placement.devices[rank],
        "shares_device": placement.shares_device(rank),
        "backend": placement.backend,
        "num_threads": placement.num_threads,
        "generation": generation,
        "cells_folder": str(home),
        "engine_arguments": engine_arguments(profile, rank),
    }
