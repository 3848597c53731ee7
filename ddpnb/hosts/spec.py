"""The options of a cluster on other hosts.  Runs in the kernel."""

import re
from dataclasses import dataclass

from ddpnb.cluster.placement import MAX_RANKS, ClusterSpec
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.options import option

ENGINES = ("slurm", "mpi", "pbs", "lsf", "sge", "htcondor", "local")
"""The launchers of ipyparallel that can start ranks; ``local`` starts them on this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsSpec(ClusterSpec):
    """The user's options for a cluster, including the options for other hosts."""

    hosts: str = option(
        "", "hosts that ssh can reach, each with its number of ranks", example="a:4,b:4"
    )
    interface: str = option(
        "", "network interface between hosts; by default the interface of ssh", example="NAME"
    )
    python: str = option(
        "",
        "path to Python on the hosts; by default the kernel's path, or python3 if it is missing",
        example="PATH",
    )
    engines: str = option(
        "",
        "launcher of ipyparallel that starts the ranks, instead of ssh",
        example="NAME",
        choices=ENGINES,
    )
    profile: str = option("", "ipyparallel profile that configures the launcher", example="NAME")
    ranks_per_host: int | None = option(
        None, "number of ranks per host (with a launcher); by default all on one host", least=1
    )
    timeout: float | None = option(
        None, "maximum seconds to wait for a queued job; by default 600", above=0, example="SECONDS"
    )

    @property
    def is_launched(self) -> bool:
        """True if a launcher of ipyparallel starts the ranks."""
        return bool(self.engines or self.profile)

    @property
    def is_remote(self) -> bool:
        """True if agents start the ranks, on other hosts or on this host."""
        return bool(self.hosts or self.is_launched)

    def __post_init__(self) -> None:
        ClusterSpec.__post_init__(self)
        if self.devices and self.is_remote:
            raise UserError("--devices emulates devices on this host only. Remove --devices.")
        if not self.is_launched and (self.ranks_per_host or self.timeout):
            raise UserError(
                "--ranks-per-host and --timeout need a launcher. Add --engines or --profile."
            )
        if not self.is_remote and (self.interface or self.python):
            raise UserError("--interface and --python are for other hosts. Add --hosts a:4,b:4.")
        if self.hosts:
            parse_hosts(self.hosts)
            if self.is_launched or self.num_ranks is not None:
                raise UserError(
                    "--hosts sets the number of ranks that ssh starts on each host (a:4,b:4). "
                    "Remove -n, --engines and --profile."
                )
        elif self.is_launched:
            if self.num_ranks is None:
                raise UserError("--engines and --profile need -n, the number of ranks. Add -n 4.")
            if self.num_ranks % (size := self.ranks_per_host or self.num_ranks):
                raise UserError(
                    f"--ranks-per-host {size} does not divide -n {self.num_ranks} evenly. Change "
                    "one of the two numbers."
                )


_HOST = re.compile(r"([A-Za-z0-9_][\w.@-]*)(?::(\d+))?")


def parse_hosts(text: str) -> dict[str, int | None]:
    """Return the number of ranks of each host in ``"a:4,b:4"``; None if a host has no number."""
    found: dict[str, int | None] = {}
    for part in text.replace(" ", "").split(","):
        match = _HOST.fullmatch(part)
        if match is None or match[1] in found or not 1 <= int(match[2] or 1) <= MAX_RANKS:
            raise UserError(
                f"{part!r} is not valid in --hosts. Write a:4,b:4 without quotes and spaces. Name "
                f"each host once, as ssh knows it, with 1 to {MAX_RANKS} ranks. Set ports in "
                "~/.ssh/config."
            )
        found[match[1]] = int(match[2]) if match[2] else None
    return found
