"""The options of a cluster on other hosts (kernel)."""

import re
from dataclasses import dataclass

from ddpnb.cluster.placement import MAX_RANKS, ClusterSpec
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.options import option

ENGINES = ("slurm", "mpi", "pbs", "lsf", "sge", "htcondor", "local")
"""The launchers of ipyparallel that start ranks; ``local`` does so on this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsSpec(ClusterSpec):
    """The user's choices, those on other hosts among them."""

    hosts: str = option(
        "", "hosts that ssh reaches, each with its number of ranks", example="a:4,b:4"
    )
    interface: str = option(
        "", "the network between the hosts; by default the one that ssh came by", example="NAME"
    )
    python: str = option(
        "",
        "the Python on the hosts; by default this one's path if it exists, else python3",
        example="PATH",
    )
    engines: str = option(
        "",
        "ipyparallel's launcher that starts the ranks: slurm, mpi, pbs, ...; by default ssh does",
        example="NAME",
        choices=ENGINES,
    )
    profile: str = option("", "of ipyparallel, with the launcher's settings", example="NAME")
    ranks_per_host: int | None = option(
        None, "of -n, with --engines or --profile; by default all on one host", least=1
    )
    timeout: float | None = option(
        None, "seconds that a job may wait in the queue; by default 600", above=0, example="SECONDS"
    )

    @property
    def is_launched(self) -> bool:
        """Whether a launcher of ipyparallel starts the ranks."""
        return bool(self.engines or self.profile)

    @property
    def is_remote(self) -> bool:
        """Whether agents start the ranks, on hosts that may be others."""
        return bool(self.hosts or self.is_launched)

    def __post_init__(self) -> None:
        ClusterSpec.__post_init__(self)
        if self.devices and self.is_remote:
            raise UserError("Emulated devices are on the CPU of this host: leave one out.")
        if not self.is_launched and (self.ranks_per_host or self.timeout):
            raise UserError(
                "--ranks-per-host and --timeout are for --engines and --profile: add one of them."
            )
        if not self.is_remote and (self.interface or self.python):
            raise UserError("--interface and --python are for other hosts: name them with --hosts.")
        if self.hosts:
            parse_hosts(self.hosts)
            if self.is_launched or self.num_ranks is not None:
                raise UserError(
                    "--hosts says how many ranks ssh starts on each host (a:4,b:4): leave out -n, "
                    "--engines and --profile."
                )
        elif self.is_launched:
            if self.num_ranks is None:
                raise UserError("--engines and --profile need -n, the number of ranks to start.")
            if self.num_ranks % (size := self.ranks_per_host or self.num_ranks):
                raise UserError(f"-n {self.num_ranks} is no multiple of --ranks-per-host {size}.")


_HOST = re.compile(r"([A-Za-z0-9_][\w.@-]*)(?::(\d+))?")


def parse_hosts(text: str) -> dict[str, int | None]:
    """Return the number of ranks of each host of ``"a:4,b:4"``, None where none is given."""
    found: dict[str, int | None] = {}
    for part in text.replace(" ", "").split(","):
        match = _HOST.fullmatch(part)
        if match is None or match[1] in found or not 1 <= int(match[2] or 1) <= MAX_RANKS:
            raise UserError(
                "Write --hosts as a:4,b:4 without quotes and spaces, names that ssh knows, each "
                f"once, and a number of ranks (1 to {MAX_RANKS}), not {part!r}; a port goes into "
                "~/.ssh/config."
            )
        found[match[1]] = int(match[2]) if match[2] else None
    return found
