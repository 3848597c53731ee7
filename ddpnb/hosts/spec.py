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
        "",
        "the network between the hosts; by default the one that ssh came by",
        example="NAME",
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
        None, "of -n, with --engines or --profile; by default all on one host"
    )
    timeout: float | None = option(
        None,
        "seconds that a job may wait in the queue; by default 600",
        above=0,
        example="SECONDS",
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
        if not self.is_remote:
            self._refuse("is for ranks on other hosts: name them with --hosts.", self._remote_only)
            return
        if self.devices:
            raise UserError("Emulated devices are ranks on the CPU of this host: leave one out.")
        if self.hosts:
            parse_hosts(self.hosts)
            if self.num_ranks is not None or self.ranks_per_host is not None:
                raise UserError(
                    "--hosts says how many ranks each host has (a:4,b:4): leave out -n and "
                    "--ranks-per-host."
                )
        if self.is_launched:
            self._check_launched()
        else:
            self._refuse("is for --engines and --profile: add one of them.", ("timeout",))

    @property
    def _remote_only(self) -> tuple[str, ...]:
        return ("interface", "python", "ranks_per_host", "timeout")

    def _refuse(self, sentence: str, names: tuple[str, ...]) -> None:
        """Raise a UserError if one of these options is given."""
        for name in names:
            if getattr(self, name):
                raise UserError(f"--{name.replace('_', '-')} {sentence}")

    def _check_launched(self) -> None:
        if self.hosts and self.engines != "mpi":
            raise UserError("The launcher chooses the hosts: leave out --hosts, or use MPI or ssh.")
        if not self.hosts and self.num_ranks is None:
            raise UserError("--engines and --profile need -n, the number of ranks to start.")
        size = self.ranks_per_host
        if size is not None and (size < 1 or (self.num_ranks or 0) % size):
            raise UserError(f"-n {self.num_ranks} is no multiple of --ranks-per-host {size}.")


_HOST = re.compile(r"([A-Za-z0-9_][\w.@-]*)(?::(\d+))?")


def parse_hosts(text: str) -> dict[str, int | None]:
    """Return the number of ranks of each host of ``"a:4,b:4"``, None where none is given.

    Raises:
        UserError: it is written in another way, or names a host twice.
    """
    found: dict[str, int | None] = {}
    for part in text.replace(" ", "").split(","):
        match = _HOST.fullmatch(part)
        if match is None or not 1 <= int(match[2] or 1) <= MAX_RANKS:
            raise UserError(
                "Write --hosts as a:4,b:4 without quotes and spaces, names that ssh knows and a "
                f"number of ranks (1 to {MAX_RANKS}), not {part!r}; a port goes into ~/.ssh/config."
            )
        if match[1] in found:
            raise UserError(f"--hosts names {match[1]} twice: add its ranks up.")
        found[match[1]] = int(match[2]) if match[2] else None
    return found
