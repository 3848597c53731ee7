"""Chooses the host, device, threads and other settings of each rank.  Runs in the kernel."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpnb.protocol.devices import CARDS, MODELS, count_devices
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.options import Option, check_options, option

DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
MAX_RANKS = 256
MAX_THREADS = 1024
"""Maximum number of threads per rank if DDPNB_MAX_THREADS does not set another limit."""
MAX_DEFAULT_CPU_RANKS = 4
MAX_RANKS_PER_CORE = 4
"""If there are more CPU ranks per core than this, ddpnb warns that timings are misleading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The options of a cluster.  ``place_ranks`` replaces options that are None or "auto"."""

    num_ranks: int | None = option(
        None,
        "number of ranks; by default one rank per GPU, or up to 4 ranks on CPUs",
        flag="-n",
        least=1,
        most=MAX_RANKS,
    )
    devices: str = option(
        "",
        "devices to emulate in all comparisons; ddpnb starts one rank per device",
        example="8xV100",
        offers=tuple(f"8x{card}" for card in CARDS),
    )
    as_: str = option(
        "", "model whose published step times are emulated", example="MODEL", offers=tuple(MODELS)
    )
    device: str = option("auto", "hardware that ranks use", choices=DEVICES, example="NAME")
    backend: str = option("auto", "torch.distributed backend", choices=BACKENDS, example="NAME")
    num_threads: int | None = option(
        None,
        "number of CPU threads per rank; by default the cores are divided between the ranks",
        flag="--threads",
        least=1,
    )

    @property
    def is_on_cpu(self) -> bool:
        """True if the ranks run on CPUs on every machine, including machines with GPUs."""
        return self.device == "cpu" or bool(self.devices)

    def __post_init__(self) -> None:
        check_options(self)
        if self.devices:
            num, _, _ = count_devices(self.devices)
            if self.num_ranks not in (None, num):
                raise UserError(
                    f"--devices {self.devices} starts {num} ranks. Remove -n {self.num_ranks}."
                )
            if self.device == "cuda":
                raise UserError("--devices emulates devices on CPUs. Remove --device cuda.")
            object.__setattr__(self, "num_ranks", num)
        elif self.as_:
            raise UserError(f"--as {self.as_} needs emulated devices. Add --devices 8xV100.")
        check_num_ranks(self.num_ranks or 1)
        if self.is_on_cpu and self.backend == "nccl":
            raise UserError("NCCL works on GPUs only. Use --backend gloo on CPUs.")


def check_num_ranks(num: int) -> None:
    """Raise UserError if ddpnb or DDPNB_MAX_RANKS does not allow ``num`` ranks."""
    if num > (most := limit("DDPNB_MAX_RANKS", MAX_RANKS)):
        why = "DDPNB_MAX_RANKS allows" if most < MAX_RANKS else "ddpnb supports"
        raise UserError(f"{num} ranks are too many. {why} at most {most}. Start fewer ranks.")


def limit(variable: str, default: int) -> int:
    """Return the limit that an administrator has set in an environment variable, or a default."""
    option = Option(default=default, about="", least=1)
    return int(option.read(variable, os.environ.get(variable, default)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host that runs ranks, with its resources."""

    name: str = ""
    """The host's name as the user wrote it.  The name of the kernel's host is empty."""
    address: str = "127.0.0.1"
    """The address at which ranks on other hosts reach this host."""
    interface: str = field(default_factory=lambda: loopback())
    """The network interface that has the host's address."""
    num_cores: float
    num_gpus: int = 0
    size: int | None = None
    """Number of ranks on the host.  If None, the number depends on the host's GPUs or cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The device and host of each rank, and the settings of all ranks."""

    devices: tuple[str, ...]
    """The device of each rank, as a name for ``torch.device``, such as ``"cuda:0"``."""
    backend: str
    num_threads: int
    hosts: tuple[Host, ...]
    host_of: tuple[int, ...]
    """For each rank, the index of its host in ``hosts``.  The first ranks run on the first host."""
    master_port: int
    """If there are several hosts, all ranks connect to this port of the first host."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    def ranks_of(self, host: int) -> list[int]:
        """Return the ranks of a host."""
        return [rank for rank, each in enumerate(self.host_of) if each == host]


def place_ranks(
    spec: ClusterSpec, hosts: Sequence[Host], master_port: int | None = None
) -> Placement:
    """Choose the host and the device of each rank.

    By default, each GPU gets one rank.  If no host has a GPU, the ranks use CPUs.
    ``master_port`` is a port of the first host.  By default, ddpnb chooses a free local port.
    """
    without = [host for host in hosts if not host.num_gpus]
    if without and not spec.is_on_cpu and (spec.device == "cuda" or len(without) < len(hosts)):
        host = without[0]
        remedy = "Use --device cpu" + (", or remove the host." if host.name else ".")
        raise UserError(f"{_spoken(host)} has no GPU with CUDA. {remedy}")
    on_gpus = not without and not spec.is_on_cpu
    fewest = 2 // len(hosts) or 1  # a single rank shows no communication
    sizes, devices, backends, host_of = [], [], [], list[int]()
    for number, host in enumerate(hosts):
        num_gpus = host.num_gpus if on_gpus else 0
        default = num_gpus or max(fewest, min(int(host.num_cores), MAX_DEFAULT_CPU_RANKS))
        default = min(default, limit("DDPNB_MAX_RANKS", MAX_RANKS))
        size = host.size or (spec.num_ranks if len(hosts) == 1 else None) or default
        backends.append(_choose_backend(spec, host, size, num_gpus))
        sizes.append(size)
        host_of += [number] * size
        devices += [f"cuda:{n % num_gpus}" if num_gpus else "cpu" for n in range(size)]
    check_num_ranks(len(devices))
    shares = [max(1, int(host.num_cores // size)) for host, size in zip(hosts, sizes, strict=True)]
    return Placement(
        devices=tuple(devices),
        backend="nccl" if set(backends) == {"nccl"} else "gloo",
        num_threads=min(spec.num_threads or min(shares), limit("DDPNB_MAX_THREADS", MAX_THREADS)),
        hosts=tuple(hosts),
        host_of=tuple(host_of),
        master_port=free_port() if master_port is None else master_port,
    )


def _choose_backend(spec: ClusterSpec, host: Host, num_ranks: int, num_gpus: int) -> str:
    """Return NCCL if each rank has a GPU, else gloo.  NCCL allows only one rank per GPU."""
    if spec.backend == "nccl" and num_ranks > num_gpus:
        raise UserError(
            f"{_spoken(host)} has {num_gpus} GPUs for {num_ranks} ranks, but NCCL allows only one "
            "rank per GPU. Start fewer ranks, or use --backend gloo."
        )
    if spec.backend != "auto":
        return spec.backend
    return "nccl" if num_gpus and num_ranks <= num_gpus else "gloo"


def _spoken(host: Host) -> str:
    return f"Host {host.name}" if host.name else "This machine"


def torchrun_environment(placement: Placement, rank: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets, so that scripts run unchanged.

    The variables tell libraries that the ranks' processes already exist.  Unlike torchrun, ddpnb
    has no agent that runs a store.  ``ACCELERATE_USE_CPU`` is set as in ``accelerate launch``,
    because accelerate and transformers would otherwise train a separate model on each CPU rank.
    """
    size = str(placement.num_ranks)
    host = placement.host_of[rank]
    neighbours = placement.ranks_of(host)
    interface = placement.hosts[host].interface
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - neighbours[0]),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": str(host),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(len(neighbours)),
        "ROLE_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": str(len(placement.hosts)),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": f"ddpnb-{placement.master_port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # Across hosts, a store listens at MASTER_PORT, like the agent's store under torchrun.
        "TORCHELASTIC_USE_AGENT_STORE": str(len(placement.hosts) > 1),
        "MASTER_ADDR": placement.hosts[0].address,
        "MASTER_PORT": str(placement.master_port),
        "OMP_NUM_THREADS": str(placement.num_threads),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        "ACCELERATE_USE_CPU": str(placement.devices[rank] == "cpu").lower(),
    }


def loopback() -> str:
    """Return the name of the loopback interface: ``lo`` on Linux, ``lo0`` on macOS."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def controller_arguments(profile: Path, address: str, ports: Sequence[int]) -> list[str]:
    """Return the command line for ipyparallel's controller.

    Engines connect to the controller at ``address`` and ``ports`` of this host.  If ``address`` is
    empty, all sockets are files (see ``LocalController``).
    """
    place = str(profile / "socket")
    return [
        f"--profile-dir={profile}",
        *(f"--IPController.{use}_ip={place}" for use in ("client", "monitor")),
        f"--IPController.engine_ip={address or place}",
        f"--IPController.engine_transport={'tcp' if address else 'ipc'}",
        *([f"--IPController.engine_ports={','.join(map(str, ports))}"] if ports else []),
        "--IPController.client_transport=ipc",
        "--IPController.monitor_transport=ipc",
        "--location=127.0.0.1",
        "--log-level=ERROR",
        "--IPController.enable_curve=True",
        "--IPController.use_threads=True",  # two processes instead of nine
        "--IPController.db_class=ipyparallel.controller.dictdb.NoDB",  # do not keep all results
        "--HeartMonitor.period=100",  # ms; ranks are registered on a heartbeat
        "--HeartMonitor.max_heartmonitor_misses=864000",  # a day: the fork server reports deaths
    ]


def rank_settings(
    placement: Placement, rank: int, *, home: Path, generation: int | None
) -> dict[str, Any]:
    """Return the settings of a rank's process, for ``ddpnb.forkserver.child.run``.

    ``home`` is the folder in which cells start.  ``generation`` is the number of the process group
    to join, or None to join no group.
    """
    own = placement.host_of[rank]
    return {
        "environment": torchrun_environment(placement, rank),
        "device": placement.devices[rank],
        "backend": placement.backend,
        "num_threads": placement.num_threads,
        "generation": generation,
        "cells_folder": str(home),
        "host": placement.hosts[own].name,
        "peers": [host.address for host in placement.hosts if host is not placement.hosts[own]],
    }
