"""How relays come to be on other hosts: what ssh and launchers have in common (kernel)."""

import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ddpnb.cluster.link import ForkServerLink
from ddpnb.hosts.router import Router


@dataclass(kw_only=True, slots=True, eq=False)
class RemoteHost:
    """One host, as the kernel sees it."""

    name: str
    """As the user wrote it, or as it calls itself."""
    size: int | None
    """How many ranks are to be there; None: as many as fit."""
    relay: str
    """The name of its relay in the router."""
    link: ForkServerLink = field(init=False)
    """To its agent."""
    report: dict[str, Any] = field(default_factory=dict)
    """What it has; ``clock`` is by how many seconds it is ahead."""


class Starter(abc.ABC):
    """Has relays started on hosts, and gives the hosts back."""

    router: Router
    address: str = ""
    """Of this host, where the engines reach the controller; empty: at forwarded sockets."""

    @abc.abstractmethod
    def wait(self, progress: Callable[[str], None]) -> list[RemoteHost]:
        """Wait until all hosts are there.

        ``progress`` is called with a few words on what is waited for.  A UserError says why they
        do not come.
        """

    @abc.abstractmethod
    def start_again(self, host: RemoteHost) -> None:
        """Have a relay started on a host that has lost it; a UserError says why it cannot be."""

    @abc.abstractmethod
    def explain(self, host: RemoteHost) -> str:
        """Return the sentence on why a host's agent has ended before it was of use."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Disconnect from the relays, which ends them, and give the hosts back."""
