"""Requests to run a method of ``rank.calls.RankApi`` on ranks.  Used in every process.

``calls.state()`` makes a ``Request``, but for mypy it is the result on a rank.  So mypy checks the
arguments, and ``ask(cluster, calls.state())`` returns the ``RankState`` of each rank.  The kernel
imports only the type of ``RankApi``, because ``RankApi`` needs torch.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast, final

if TYPE_CHECKING:
    from ddpnb.rank.calls import RankApi

Result = TypeVar("Result")


@final
@dataclass(frozen=True, slots=True)
class Request:
    """One call: a method's name and arguments.  A rank answers with the result or a ``Failure``."""

    name: str
    arguments: tuple[Any, ...]
    folder: str = ""
    """The rank changes to this folder before the call, unless the folder is empty."""

    def __call__(self) -> Any:
        """Run the call on the rank."""
        calls_on_rank = importlib.import_module("ddpnb.rank.calls")  # never in the kernel
        return calls_on_rank.carry_out(self.name, self.arguments, self.folder)


@final
class _Requests:
    def __getattr__(self, name: str) -> Callable[..., Request]:
        return lambda *arguments: Request(name, arguments)


calls = cast("RankApi", _Requests())
