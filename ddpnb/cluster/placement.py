"""The cluster that a user asks for: each rank's device, threads and settings (kernel)."""

import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpnb.protocol.devices import CARDS, MODELS, num_devices
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.options import check_options, option
from ddpnb.protocol.processes import num_cores

DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
METHODS = ("fork", "spawn")
"""Ways to start ranks."""
ENGINES = ("slurm", "mpi")
"""What starts ranks on other hosts, besides ssh."""
CHOSEN_IN_SLURM = ("nodes", "ntasks", "ntasks-per-node", "job-name", "no-shell", "chdir")
MAX_RANKS = 256
MAX_DEFAULT_CPU_RANKS = 4
MAX_RANKS_PER_CORE = 4
"""With more, ranks on CPUs far outnumber the cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The user's choices; ``None`` and ``"auto"`` leave them to ``place_ranks``."""

    num_ranks: int | None = option(
        None,
        "-n",
        "number of ranks; by default one per GPU, or up to 4 on the CPU",
        least=1,
        most=MAX_RANKS,
    )
    devices: str = option(
        "",
        "--devices",
        "emulate these in all comparisons: a rank for each",
        example="8xV100",
        offers=tuple(f"8x{card}" for card in CARDS),
    )
    as_: str = option(
        "", "--as", "whose published figures these have", example="MODEL", offers=tuple(MODELS)
    )
    device: str = option(
        "auto", "--device", "what the ranks compute on", choices=DEVICES, example="NAME"
    )
    backend: str = option(
        "auto", "--backend", "of torch.distributed", choices=BACKENDS, example="NAME"
    )
    num_threads: int | None = option(
        None,
        "--threads",
        "CPU threads of each rank; by default the cores divided by the ranks",
        least=1,
    )
    method: str | None = option(
        None,
        "--method",
        "how ranks start; by default fork on Linux, spawn elsewhere",
        choices=METHODS,
        example="NAME",
    )
    hosts: str = option(
        "", "--hosts", "hosts that ssh reaches, each with its number of ranks", example="a:4,b:4"
    )
    interface: str = option(
        "",
        "--interface",
        "the network between the hosts; by default the one that ssh came by",
        example="NAME",
    )
    python: str = option(
        "",
        "--python",
        "the Python on the hosts; by default this one's path if it exists, else python3",
        example="PATH",
    )
    engines: str = option(
        "",
        "--engines",
        f"{' | '.join(ENGINES)}: what starts the ranks on other hosts; by default ssh",
        example="NAME",
        offers=ENGINES,
    )
    profile: str = option(
        "", "--profile", "of ipyparallel, whose launcher starts the ranks", example="NAME"
    )
    ranks_per_host: int | None = option(
        None, "--ranks-per-host", "of -n, with --engines or --profile; by default all on one host"
    )
    slurm: str = option(
        "", "--slurm", 'of Slurm\'s job: "partition=gpu time=1:00:00"', example="OPTIONS"
    )
    timeout: float | None = option(
        None,
        "--timeout",
        "seconds that a job may wait in the queue; by default 600",
        above=0,
        example="SECONDS",
    )

    @property
    def is_remote(self) -> bool:
        """Whether the ranks are started by agents, on hosts that may be others."""
        return bool(self.hosts or self.engines or self.profile)

    @property
    def is_on_cpu(self) -> bool:
        """Whether no GPU is used, whatever this machine has."""
        return self.device == "cpu" or bool(self.devices)

    def __post_init__(self) -> None:
        check_options(self)
        if self.devices:
            self._stand_for(num_devices(self.devices))
        elif self.as_:
            raise UserError(f"--as {self.as_} describes emulated devices: add --devices 8xV100.")
        if self.is_on_cpu and self.backend == "nccl":
            raise UserError("NCCL works on GPUs only: use --backend gloo with --device cpu.")
        self._check_hosts()

    def _stand_for(self, num: int) -> None:
        if self.num_ranks not in (None, num):
            raise UserError(
                f"--devices {self.devices} starts {num} ranks: leave -n {self.num_ranks} out."
            )
        if self.device == "cuda" or self.is_remote:
            raise UserError("Emulated devices are ranks on the CPU of this host: leave one out.")
        object.__setattr__(self, "num_ranks", num)

    def _check_hosts(self) -> None:
        if self.engines and self.engines not in ENGINES:
            raise UserError(
                f"--engines is slurm or mpi, not {self.engines!r}: for another batch system name a "
                "profile of ipyparallel, --profile NAME; for none, --hosts a:4,b:4."
            )
        self._check_job()
        if not self.is_remote:
            if given := "--interface" * bool(self.interface) or "--python" * bool(self.python):
                raise UserError(f"{given} is for ranks on other hosts: name them with --hosts.")
            return
        if self.hosts:
            parse_hosts(self.hosts)
        if self.hosts and self.num_ranks is not None:
            raise UserError("--hosts says how many ranks each host has (a:4,b:4): leave out -n.")
        if self.method == "spawn":
            raise UserError("On other hosts ranks are forked: leave method out with --hosts.")

    def _check_job(self) -> None:
        """Check the options of Slurm, MPI and profiles."""
        if self.slurm and self.engines != "slurm":
            raise UserError("--slurm is for --engines slurm: add that, or leave it out.")
        if self.timeout is not None and not (self.engines == "slurm" or self.profile):
            raise UserError("--timeout is for --engines slurm and --profile: add one of them.")
        if self.ranks_per_host is not None:
            if self.hosts and not self.engines:
                raise UserError(
                    "--hosts says for each host how many ranks it has: leave out --ranks-per-host, "
                    f"and write --hosts a:{self.ranks_per_host},b:{self.ranks_per_host}."
                )
            if not (self.engines or self.profile):
                raise UserError("--ranks-per-host is for --engines and --profile: add one of them.")
            if self.hosts or self.num_ranks is None:
                raise UserError("--ranks-per-host goes with -n, the number of all ranks.")
            if self.ranks_per_host < 1 or self.num_ranks % self.ranks_per_host:
                raise UserError(
                    f"-n {self.num_ranks} is no multiple of --ranks-per-host {self.ranks_per_host}."
                )
        if self.profile and (self.engines or self.hosts):
            raise UserError("--profile starts the ranks: leave out --engines and --hosts.")
        if self.profile and self.num_ranks is None:
            raise UserError("--profile needs -n, the number of ranks to start.")
        if self.engines == "slurm":
            if self.hosts:
                raise UserError("Slurm chooses the hosts: leave out --hosts with --engines slurm.")
            if self.num_ranks is None:
                raise UserError("--engines slurm needs -n, the number of ranks to ask Slurm for.")
            parse_slurm(self.slurm)


_HOST = re.compile(r"([A-Za-z0-9_][\w.@-]*)(?::(\d+))?")


def parse_hosts(text: str) -> tuple[tuple[str, int | None], ...]:
    """Return the hosts of ``"a:4,b:4"``, each with its number of ranks, None where none is given.

    Raises:
        UserError: it is written in another way, or names a host twice.
    """
    found: list[tuple[str, int | None]] = []
    for part in text.replace(" ", "").split(","):
        match = _HOST.fullmatch(part)
        if match is None or not 1 <= int(match[2] or 1) <= MAX_RANKS:
            raise UserError(
                "Write --hosts as a:4,b:4 without quotes and spaces, names that ssh knows and a "
                f"number of ranks (1 to {MAX_RANKS}), not {part!r}; a port goes into ~/.ssh/config."
            )
        if match[1] in [name for name, _ in found]:
            raise UserError(f"--hosts names {match[1]} twice: add its ranks up.")
        found.append((match[1], int(match[2]) if match[2] else None))
    return tuple(found)


_SLURM_OPTION = re.compile(r"-{0,2}([a-z][a-z-]*[a-z])(=\S.*)?")


def parse_slurm(text: str) -> list[str]:
    """Return Slurm's command line for ``"partition=gpu time=1:00:00"``.

    Raises:
        UserError: it is written in another way, or names what ddpnb itself chooses.
    """
    found = []
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":  # as a magic's line has it
        text = text[1:-1]
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--slurm {text}: {error}.") from None
    for part in parts:
        match = _SLURM_OPTION.fullmatch(part)
        if match is None:
            raise UserError(
                f'Write --slurm as "partition=gpu time=1:00:00", long names of sbatch\'s options, '
                f"not {part!r}."
            )
        if match[1] in CHOSEN_IN_SLURM:
            raise UserError(
                f"--slurm {match[1]}: leave it out, -n and --ranks-per-host say how many nodes and "
                "tasks there are."
            )
        found.append(f"--{match[1]}{match[2] or ''}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """What the agent of a host reports of it."""

    name: str
    """As the user wrote it."""
    address: str
    """By which the other hosts reach it."""
    interface: str
    """The network interface with this address."""
    num_cores: int
    num_gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The device of each rank, and what all ranks share."""

    devices: tuple[str, ...]
    """The device of each rank, as ``torch.device`` spells it."""
    backend: str
    num_threads: int
    hosts: tuple[HostReport, ...] = ()
    """The hosts that ssh reaches; empty: all ranks are on the kernel's own."""
    sizes: tuple[int, ...] = ()
    """How many ranks each of these hosts has: the first ones are the first host's."""

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.devices)

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        host = 0
        while host < len(self.sizes) - 1 and rank >= sum(self.sizes[: host + 1]):
            host += 1
        return host

    def ranks_of(self, host: int) -> range:
        """Return the ranks of a host."""
        if not self.sizes:
            return range(self.num_ranks)
        first = sum(self.sizes[:host])
        return range(first, first + self.sizes[host])

    def shares_device(self, rank: int) -> bool:
        """Return whether another rank computes on the same GPU."""
        device, neighbours = self.devices[rank], self.ranks_of(self.host_of(rank))
        return device != "cpu" and [self.devices[each] for each in neighbours].count(device) > 1


def asks_for_gpus(spec: ClusterSpec) -> bool:
    """Return whether ranks can be placed only once the fork server has listed the GPUs."""
    may_have_some = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
    return spec.device == "cuda" or (not spec.is_on_cpu and may_have_some)


def place_ranks(spec: ClusterSpec, num_gpus: int) -> Placement:
    """Place the ranks: one per GPU if there are GPUs, else on the CPU's cores.

    Raises:
        UserError: this host has no such devices.
    """
    if spec.device == "cuda" and num_gpus == 0:
        raise UserError("There is no GPU on this machine: use --device cpu, or leave it out.")
    on_gpus = num_gpus > 0 and not spec.is_on_cpu
    default = num_gpus if on_gpus else max(2, min(num_cores(), MAX_DEFAULT_CPU_RANKS))
    num_ranks = spec.num_ranks or default
    devices = tuple(f"cuda:{rank % num_gpus}" if on_gpus else "cpu" for rank in range(num_ranks))
    return Placement(
        devices=devices,
        backend=choose_backend(spec, num_ranks, num_gpus if on_gpus else 0),
        num_threads=spec.num_threads or max(1, num_cores() // num_ranks),
    )


def place_on_hosts(spec: ClusterSpec, hosts: Sequence[HostReport]) -> Placement:
    """Place the ranks host by host: on each one per GPU if all hosts have GPUs, else on the cores.

    Raises:
        UserError: a host has no such devices.
    """
    without = [host.name for host in hosts if not host.num_gpus]
    if spec.device == "cuda" and without:
        raise UserError(f"Host {without[0]} has no GPU: use --device cpu, or leave the host out.")
    if spec.device == "auto" and 0 < len(without) < len(hosts):
        raise UserError(
            f"Host {without[0]} has no GPU and another has: use --device cpu, or leave it out."
        )
    on_gpus = not without and not spec.is_on_cpu
    sizes, devices, backends = [], [], []
    for host, (_, asked) in zip(hosts, parse_hosts(spec.hosts), strict=True):
        num_gpus = host.num_gpus if on_gpus else 0
        size = asked or num_gpus or max(1, min(host.num_cores, MAX_DEFAULT_CPU_RANKS))
        try:
            backends.append(choose_backend(spec, size, num_gpus))
        except UserError as error:
            raise UserError(f"Host {host.name}: {error}") from None
        sizes.append(size)
        devices += [f"cuda:{n % num_gpus}" if num_gpus else "cpu" for n in range(size)]
    if len(devices) > MAX_RANKS:
        raise UserError(f"--hosts asks for {len(devices)} ranks: at most {MAX_RANKS} are possible.")
    shares = [max(1, host.num_cores // size) for host, size in zip(hosts, sizes, strict=True)]
    return Placement(
        devices=tuple(devices),
        backend="nccl" if set(backends) == {"nccl"} else "gloo",
        num_threads=spec.num_threads or min(shares),
        hosts=tuple(hosts),
        sizes=tuple(sizes),
    )


def common_imports(placement: Placement | None) -> str:
    """Return which modules the fork server imports besides torch, with spaces between them.

    The first DDP and the first optimizer import torch's compiler, which takes over a second.  A few
    ranks do so at the same time; where they far outnumber the cores it is done once for all.
    """
    num = placement.devices.count("cpu") if placement else 0
    return "torch._dynamo" if num >= MAX_RANKS_PER_CORE * num_cores() else ""


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
    host = placement.host_of(rank)
    neighbours = placement.ranks_of(host)
    interface = placement.hosts[host].interface if placement.hosts else "lo"
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - neighbours[0]),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": str(host),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(len(neighbours)),
        "ROLE_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": str(max(1, len(placement.hosts))),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": f"ddpnb-{master_port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # Across hosts a store listens at MASTER_PORT, as the agent's does under torchrun.
        "TORCHELASTIC_USE_AGENT_STORE": str(len(placement.hosts) > 1),
        "MASTER_ADDR": placement.hosts[0].address if placement.hosts else "127.0.0.1",
        "MASTER_PORT": str(master_port),
        "OMP_NUM_THREADS": str(placement.num_threads),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        "ACCELERATE_USE_CPU": str(placement.devices[rank] == "cpu").lower(),
    }


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


CONTROLLER = (
    *(f"--IPController.{use}_transport=ipc" for use in ("client", "monitor")),
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


def controller_arguments(profile: Path, address: str = "", ports: Sequence[int] = ()) -> list[str]:
    """Return ipyparallel's command line for the controller.

    Engines connect to its ``ports`` at an ``address`` of this host; without one, all its sockets
    are files: see ``LocalController``.
    """
    place = str(profile / "socket")
    return [
        f"--profile-dir={profile}",
        *(f"--IPController.{use}_ip={place}" for use in ("client", "monitor")),
        f"--IPController.engine_ip={address or place}",
        f"--IPController.engine_transport={'tcp' if address else 'ipc'}",
        *([f"--IPController.engine_ports={','.join(map(str, ports))}"] if ports else []),
        *CONTROLLER,
    ]


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
        "host": placement.hosts[placement.host_of(rank)].name if placement.hosts else "",
        "peers": [
            host.address
            for number, host in enumerate(placement.hosts)
            if number != placement.host_of(rank)
        ],
    }
