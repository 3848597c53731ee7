"""Copies variables and functions to the ranks, and values to the notebook.  Runs in the kernel."""

import contextlib
import inspect
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, final

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.wording import full_stop
from ddpnb.protocol.calls import calls
from ddpnb.protocol.errors import UserError, kind_of
from ddpnb.protocol.notation import parse_ranks
from ddpnb.protocol.options import Option
from ddpnb.protocol.variables import NOTEBOOK_FUNCTIONS, Parcel, dump, packed, receive
from ddpnb.session.asking import ask
from ddpnb.session.errors import RankError

PREFIX = "variables-"
"""Prefix of the names of files that contain variables.  The files are removed after each call."""
REMOVAL_SECONDS = 0.2
"""Seconds to wait for the end of a removal, if another program is removing the run folder."""


def push(cluster: Cluster, variables: Mapping[str, object], ranks: str | None) -> None:
    """Copy variables to ranks; raise UserError and send nothing if a variable cannot be sent."""
    chosen = parse_ranks(ranks, len(cluster.ranks))
    send_parts(cluster, pickled(variables, dict(variables)), variables, chosen, calls.push)


def pickled(variables: Mapping[str, object], value: object) -> list[memoryview]:
    """Pickle a value that contains variables; raise UserError if a variable cannot be pickled."""
    try:
        return dump(value, for_ranks=True)
    except Exception as error:
        raise UserError(explain(variables, error)) from error


def send_parts(
    cluster: Cluster,
    parts: Sequence[memoryview],
    names: Iterable[str],
    ranks: Sequence[int],
    taken_by: Callable[[Parcel], None],
) -> None:
    """Send pickled values to ranks; raise UserError if a rank cannot read the values."""
    what = ", ".join(names)
    with (
        new_files(cluster, [""]) as path,
        mistakes_named(f"Rank {{}} cannot read {what}"),
    ):
        try:
            parcel = packed(parts, path if cluster.is_local else "")
        except MemoryError as error:
            raise UserError(f"{what} cannot be sent to the ranks: {error}.") from error
        ask(cluster, taken_by(parcel), ranks)


def pull(
    cluster: Cluster,
    expression: str,
    ranks: Sequence[int],
    given_by: Callable[[str, str, Collection[str], int], Parcel] = calls.pull,
) -> list[Any]:
    """Return the value of an expression on each rank; raise UserError if a rank has no value.

    ``given_by`` is the call that evaluates the expression.  The call has no time limit.
    """
    with new_files(cluster, [f"-{rank}" for rank in ranks]) as path:
        own = path if cluster.is_local else ""
        with mistakes_named(f"Rank {{}} cannot send the value of {expression}"):
            given = given_by(expression, own, own_classes(), len(ranks))
            found = ask(cluster, given, ranks)
        try:
            return [receive(found[rank]) for rank in ranks]
        except Exception as error:
            cause = full_stop(str(error))
            raise UserError(f"The notebook cannot read {expression}: {cause}") from error


@contextlib.contextmanager
def mistakes_named(what: str) -> Iterator[None]:
    """Replace a rank's error by a UserError that contains ``what``, the rank and the cause.

    If a rank died, its RankError is raised unchanged.
    """
    try:
        yield
    except RankError as error:
        first = min(error.failures, key=lambda each: (each.is_consequence, each.rank))
        if first.is_death:
            raise
        cause = full_stop(f"{first.name}: {first.text}")
        raise UserError(f"{what.format(first.rank)}: {cause}") from error


@contextlib.contextmanager
def new_files(cluster: Cluster, suffixes: Sequence[str]) -> Iterator[str]:
    """Create an empty file in the run folder for each suffix, and yield the path without suffix.

    At the end of the block, the files are removed, but memory mappings of the files stay valid.
    If the cluster has ended, raise a UserError that says why.
    """
    path = f"{cluster.folder}/{PREFIX}{secrets.token_hex(8)}"
    files = [Path(f"{path}{suffix}") for suffix in suffixes]
    try:
        for file in files:
            file.touch(mode=0o600, exist_ok=False)
        yield path
    except (OSError, UserError) as error:
        if not all(file.exists() for file in files):
            time.sleep(REMOVAL_SECONDS)
        if cluster.lost is not None:
            raise UserError(cluster.remedy()) from error
        raise
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def own_classes() -> tuple[str, ...]:
    """Return the names of the classes that the notebook's cells define."""
    variables = vars(sys.modules["__main__"]).items()
    return tuple(
        name
        for name, value in list(variables)
        if isinstance(value, type) and value.__module__ == "__main__"
    )


def explain(variables: Mapping[str, object], error: Exception) -> str:
    """Return a sentence that names the variable that cannot be pickled, and the reason."""
    name = ", ".join(variables)
    for each, value in variables.items():
        try:
            dump(value, for_ranks=True)
        except Exception as its_own:  # noqa: BLE001  a user's class may raise anything
            name, error = each, its_own
            break
    nothing = " Nothing was sent." if len(variables) > 1 else ""
    return f"{name} cannot be sent to the ranks: {full_stop(str(error))}{nothing}"


FUNCTIONS = {
    name: Option(default=None, about=about, flag=name)
    for name, about in {
        "model": "function that returns a new model, to be used instead of ``source``",
        "data": 'function that takes "train" or "test" and returns samples; needs ``model``',
        "loss": "function (outputs, targets) that returns the mean loss; needs ``model``",
        "metric": "function (outputs, targets) that returns held-out scores; needs ``model``",
        "training_step": "function (model, batch) that returns the mean loss; needs ``model``",
        "validation_step": "function (model, batch) that returns held-out scores; needs ``model``",
        "optimizer": "function that takes parameters and returns an optimizer; needs ``model``",
        "collate_fn": "function that takes a list of items and returns a batch; needs ``model``",
    }.items()
}
"""The arguments of ``ddpnb.compare`` that are functions."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NotebookFunctions:
    """Functions passed to ``ddpnb.compare``, pickled with the variables that they use."""

    names: tuple[str, ...]
    """The names of the given arguments, such as ``("model", "data")``."""
    parts: Sequence[memoryview]
    key: str
    """The key under which the ranks keep the functions until the next comparison with functions."""
    source: str
    """The generated cell that loads the functions, with their source code in comments."""

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self | None:
        """Return the functions among ``compare``'s arguments, or None if there is no function."""
        found = {name: given[name] for name in FUNCTIONS if given.get(name) is not None}
        if not found:
            return None
        for needed, example in (("model", "build_model"), ("data", "load")):
            if needed not in found:
                raise UserError(
                    f"compare: {next(iter(found))}= also needs {needed}=. Add a function, such as "
                    f"{needed}={example}, or pass all code as source= (a cell or a file)."
                )
        for name, value in found.items():
            if not callable(value):
                raise UserError(
                    f"compare: {name}= must be a function, not {kind_of(value)}. Define {name} "
                    "with def, and pass the function."
                )
        key = secrets.token_hex(4)
        return cls(
            names=tuple(found),
            parts=pickled(found, tuple(found.values())),
            key=key,
            source=_cell_of(found, key),
        )

    def send(self, cluster: Cluster, ranks: Sequence[int]) -> None:
        """Send the functions to ranks.  Ranks keep them until another comparison has functions."""
        keep = partial(calls.keep_functions, self.key)
        send_parts(cluster, self.parts, self.names, ranks, keep)


def _cell_of(found: Mapping[str, object], key: str) -> str:
    lines = ["# Functions of the notebook that ddpnb.compare has sent to the ranks:"]
    for name, value in found.items():
        lines += [f"# {name}={getattr(value, '__name__', type(value).__name__)}"]
        try:
            lines += [f"#     {line}".rstrip() for line in inspect.getsource(value).splitlines()]  # type: ignore[arg-type]
        except (OSError, TypeError):  # no source code
            continue
    module, function = NOTEBOOK_FUNCTIONS
    lines += [
        f"from {module} import {function}",
        f"{', '.join(found)} = {function}({key!r}, globals())",
    ]
    return "\n".join(lines)
