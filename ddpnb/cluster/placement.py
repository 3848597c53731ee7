"""The cluster that a user asks for: each rank's device, threads and settings (kernel)."""

import math
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.processes import num_cores

DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
METHODS = ("fork", "spawn")
"""Ways to start ranks."""
MAX_RANKS = 256
MAX_DEFAULT_CPU_RANKS = 4
MAX_RANKS_PER_CORE = 4
"""With more, ranks on CPUs far outnumber the cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The user's choices; ``None`` and ``"auto"`` leave them to ``place_ranks``."""

    num_ranks: int | None = None
    device: str = "auto"
    backend: str = "auto"
    num_threads: int | None = None
    method: str | None = None
    """One of ``METHODS``; by default fork on Linux, spawn elsewhere."""
    detach_seconds: float = 0.0
    """How long the ranks outlive their kernel and wait for another."""

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise one_of("device", self.device, DEVICES)
        if self.backend not in BACKENDS:
            raise one_of("backend", self.backend, BACKENDS)
        if self.method not in (None, *METHODS):
            raise one_of("method", self.method, METHODS)
        if self.num_ranks is not None and not 1 <= self.num_ranks <= MAX_RANKS:
            raise UserError(f"-n must be between 1 and {MAX_RANKS}, not {self.num_ranks}.")
        if self.num_threads is not None and self.num_threads < 1:
            raise UserError(f"--threads must be at least 1, not {self.num_threads}.")
        if not (math.isfinite(self.detach_seconds) and self.detach_seconds >= 0):
            raise UserError(
                f"--detach must be a number of seconds, 0 or more, not {self.detach_seconds:g}."
            )
        if self.device == "cpu" and self.backend == "nccl":
            raise UserError("NCCL works on GPUs only: use --backend gloo with --device cpu.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The device of each rank, and what all ranks share."""

    devices: tuple[str, ...]
    """The device of each rank, as ``torch.device`` spells it."""
    backend: str
    num_threads: int

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.devices)

    def shares_device(self, rank: int) -> bool:
        """Return whether another rank computes on the same GPU."""
        device = self.devices[rank]
        return device != "cpu" and self.devices.count(device) > 1


def asks_for_gpus(spec: ClusterSpec) -> bool:
    """Return whether ranks can be placed only once the fork server has listed the GPUs."""
    may_have_some = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
    return spec.device == "cuda" or (spec.device == "auto" and may_have_some)


def place_ranks(spec: ClusterSpec, num_gpus: int) -> Placement:
    """Place the ranks: one per GPU if there are GPUs, else on the CPU's cores.

    Raises:
        UserError: this host has no such devices.
    """
    if spec.device == "cuda" and num_gpus == 0:
        raise UserError("There is no GPU on this machine: use --device cpu, or leave it out.")
    on_gpus = num_gpus > 0 and spec.device != "cpu"
    default = num_gpus if on_gpus else max(2, min(num_cores(), MAX_DEFAULT_CPU_RANKS))
    num_ranks = spec.num_ranks or default
    devices = tuple(f"cuda:{rank % num_gpus}" if on_gpus else "cpu" for rank in range(num_ranks))
    return Placement(
        devices=devices,
        backend=choose_backend(spec, num_ranks, num_gpus if on_gpus else 0),
        num_threads=spec.num_threads or max(1, num_cores() // num_ranks),
    )


def common_imports(placement: Placement | None) -> str:
    """Return which modules the fork server imports besides torch, with spaces between them.

    The first DDP and the first optimizer import torch's compiler, which takes over a second.  A few
    ranks do so at the same time; where they far outnumber the cores it is done once for all.
    """
    num = placement.devices.count("cpu") if placement else 0
    return "torch._dynamo" if num > MAX_RANKS_PER_CORE * num_cores() else ""


def choose_backend(spec: ClusterSpec, num_ranks: int, num_gpus: int) -> str:
    """Return NCCL for one rank per GPU, else gloo: NCCL allows no two ranks on one GPU."""
    if spec.backend == "nccl" and num_gpus == 0:
        raise UserError("NCCL works on GPUs only, and there is none here: use --backend gloo.")
    if spec.backend == "nccl" and num_ranks > num_gpus:
        raise UserError(
            f"NCCL allows one rank per GPU, and {num_ranks} ranks do not fit on {num_gpus}: "
            f"use -n {num_gpus}, or --backend gloo to let ranks share a GPU."
        )
    if spec.backend != "auto":
        return spec.backend
    return "nccl" if num_gpus and num_ranks <= num_gpus else "gloo"


def torchrun_environment(placement: Placement, rank: int, master_port: int) -> dict[str, str]:
    """Return the variables that torchrun sets, so that code moves to scripts unchanged.

    Code finds from them that its processes were started for it.  Torchrun's agent, with a store of
    its own, is not there.  ``ACCELERATE_USE_CPU`` is set by ``accelerate launch``: without it,
    accelerate and transformers train a model of its own in each process that has no GPU.
    """
    size = str(placement.num_ranks)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": f"ddpnb-{master_port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
        "OMP_NUM_THREADS": str(placement.num_threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": str(placement.devices[rank] == "cpu").lower(),
    }


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


CONTROLLER = (
    "--IPController.transport=ipc",  # see ``LocalController``
    "--location=127.0.0.1",
    "--log-level=ERROR",
    "--IPController.enable_curve=True",
    "--IPController.use_threads=True",  # two processes in place of nine
    "--IPController.db_class=ipyparallel.controller.dictdb.NoDB",  # else it keeps every result
    "--HeartMonitor.period=100",  # ms; ranks are registered on a heartbeat
    "--HeartMonitor.max_heartmonitor_misses=864000",  # a day: the fork server reports deaths
)
ENGINE = (
    "--log-level=ERROR",
    "--IPEngine.enable_nanny=False",  # the fork server handles signals and deaths
    "--IPEngine.max_heartbeat_misses=0",
    "--IPEngine.timeout=120",  # s; many ranks register at once
)


def controller_arguments(profile: Path) -> list[str]:
    """Return ipyparallel's command line for the controller."""
    return [f"--profile-dir={profile}", f"--ip={profile / 'socket'}", *CONTROLLER]


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
    """Return the settings of a rank's process, as ``ddpnb.rank.engine.run`` takes them.

    ``profile`` is ipyparallel's folder, ``home`` that in which cells start, ``generation`` the
    number of the process group to join; None: join none.
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
