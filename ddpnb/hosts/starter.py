"""How relays come to be on other hosts: what ssh and launchers have in common (kernel)."""

import abc
from collections.abc import Callable
from dataclasses import dataclass

from ddpnb.hosts.router import Router


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedHost:
    """A host with a relay that has come."""

    name: str
    """As the user wrote it, or as it calls itself."""
    size: int | None
    """How many ranks are to be there; None: as many as fit."""
    relay: str
    """The relay's name in the router."""


class Starter(abc.ABC):
    """Has relays started on hosts, and gives the hosts back."""

    router: Router
    address: str = ""
    """Of this host, where the engines reach the controller; empty: at forwarded sockets."""

    @abc.abstractmethod
    def wait(self, progress: Callable[[str], None]) -> list[StartedHost]:
        """Wait until all hosts are there.

        Args:
            progress: called with a few words on what is waited for.

        Raises:
            UserError: one sentence on why they do not come.
        """

    @abc.abstractmethod
    def start_again(self, host: StartedHost) -> StartedHost:
        """Have an agent started again on a host that has lost it.

        Raises:
            UserError: one sentence on why that cannot be done.
        """

    @abc.abstractmethod
    def explain(self, host: StartedHost) -> str:
        """Return the sentence on why a host's agent has ended before it was of use."""

    def ended(self) -> str:
        """Return why all hosts are lost at once, as a part of a sentence; empty if they are not."""
        return ""

    @abc.abstractmethod
    def stop(self) -> None:
        """Disconnect from the relays, which ends them, and give the hosts back."""
