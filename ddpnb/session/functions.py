"""The functions of a notebook that a comparison trains in place of a cell (kernel)."""

import inspect
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, final

from ddpnb.cluster.cluster import Cluster
from ddpnb.protocol import calls
from ddpnb.protocol.errors import UserError, kind_of
from ddpnb.protocol.variables import NOTEBOOK_FUNCTIONS, Part
from ddpnb.session.variables import pickled, send


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NotebookFunctions:
    """Functions as ``ddpnb.compare`` got them, pickled with the names that they use."""

    names: tuple[str, ...]
    """The arguments that were given: ``("model", "data")``."""
    parts: Sequence[Part]
    key: str
    """Under which the ranks keep them, until the next comparison with functions."""
    source: str
    """The cell that stands for them, with their own text as a comment."""

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self | None:
        """Return the functions among the arguments that were given; None if there are none.

        Raises:
            UserError: ``model`` or ``data`` is missing, or one is no function, or cannot be sent.
        """
        found = {name: value for name, value in given.items() if value is not None}
        if not found:
            return None
        for needed, example in (("model", "build_model"), ("data", "load")):
            if needed not in found:
                raise UserError(
                    f"compare: {next(iter(found))}= needs {needed}= beside it: give a function, "
                    f"{needed}={example}, or all of it as source=, a cell or a file."
                )
        for name, value in found.items():
            if not callable(value):
                raise UserError(
                    f"compare: {name}= takes a function, not {kind_of(value)}: define {name} with "
                    "def, and give its name."
                )
        key = secrets.token_hex(4)
        return cls(
            names=tuple(found),
            parts=pickled(found, tuple(found.values())),
            key=key,
            source=_cell_of(found, key),
        )

    def send(self, cluster: Cluster, ranks: Sequence[int]) -> None:
        """Have ranks keep the functions."""
        keep = partial(calls.keep_functions, self.key)
        send(cluster, self.parts, self.names, ranks, keep)


def _cell_of(found: Mapping[str, object], key: str) -> str:
    lines = ["# functions of the notebook, which ddpnb.compare has sent to the ranks:"]
    for name, value in found.items():
        lines += [f"# {name}={getattr(value, '__name__', type(value).__name__)}"]
        try:
            lines += [f"#     {line}".rstrip() for line in inspect.getsource(value).splitlines()]  # type: ignore[arg-type]
        except (OSError, TypeError):  # it has no text
            continue
    module, function = NOTEBOOK_FUNCTIONS
    lines += [
        f"from {module} import {function}",
        f"{', '.join(found)} = {function}({key!r}, globals())",
    ]
    return "\n".join(lines)
