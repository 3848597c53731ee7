"""Copies variables of the notebook to the ranks, and values back (kernel)."""

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpnb.cluster.call import CALL_TIMEOUT_SECONDS, Call
from ddpnb.cluster.cluster import Cluster
from ddpnb.protocol import calls
from ddpnb.protocol.calls import RankCall, Request
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Failure
from ddpnb.protocol.variables import (
    LARGE_BYTES,
    Parcel,
    Part,
    dump,
    in_file,
    in_message,
    receive,
    size_of,
)

SLOWEST_BYTES_PER_SECOND = 1e8
"""Of a push: what is large may take so much longer than other calls."""
PREFIX = "variables-"
"""Of the files in the run folder; each is removed as soon as its call has ended."""


def push(cluster: Cluster, variables: Mapping[str, object], ranks: Sequence[int]) -> None:
    """Copy variables to ranks; raises a UserError if one cannot be sent, and then none is."""
    send(cluster, pickled(variables, dict(variables)), variables, ranks, calls.push)


def pickled(variables: Mapping[str, object], value: object) -> list[Part]:
    """Pickle for the ranks a value that is made of variables; a UserError if one cannot be."""
    try:
        return dump(value, for_ranks=True)
    except Exception as error:
        raise UserError(explain(variables, error)) from error


def send(
    cluster: Cluster,
    parts: Sequence[Part],
    names: Iterable[str],
    ranks: Sequence[int],
    taken_by: Callable[[Parcel], Request[None]],
) -> None:
    """Have a call on ranks take what was pickled; raises a UserError where one cannot.

    Args:
        cluster: of the ranks.
        parts: what was pickled.
        names: what errors call it.
        ranks: they take it.
        taken_by: returns the call that takes a parcel.
    """
    timeout = CALL_TIMEOUT_SECONDS + size_of(parts) / SLOWEST_BYTES_PER_SECOND
    with contextlib.ExitStack() as opened:
        if size_of(parts) < LARGE_BYTES or not cluster.is_local:
            parcel = in_message(parts)
            timeout *= 1 if cluster.is_local else 10
        else:
            path, (file,) = opened.enter_context(new_files(cluster.folder, [""]))
            try:
                parcel = in_file(parts, file, path)
            except MemoryError as error:
                raise UserError(
                    f"{', '.join(names)} cannot be sent to the ranks: {error}."
                ) from error
        call = cluster.submit(taken_by(parcel), ranks)
        for failure in answers(cluster, call, timeout):
            if failure is not None:
                raise UserError(
                    f"{', '.join(names)} cannot be read on rank {failure.rank}: {cause_of(failure)}"
                )


def pull(
    cluster: Cluster,
    expression: str,
    ranks: Sequence[int],
    given_by: RankCall[[str, str, Collection[str], int], Parcel] = calls.pull,
) -> list[Any]:
    """Return the value of an expression on each rank; raises a UserError where one has none.

    ``given_by`` evaluates the expression, or what it takes in its place.
    """
    with new_files(cluster.folder, [f"-{rank}" for rank in ranks]) as (path, files):
        own = path if cluster.is_local else ""
        call = cluster.submit(given_by(expression, own, own_classes(), len(ranks)), ranks)
        found = answers(cluster, call, has_advanced=growing(files))
        for value in found:
            if isinstance(value, Failure) and value.name == UserError.__name__:
                raise UserError(value.text)
            if isinstance(value, Failure):
                raise UserError(f"Rank {value.rank} cannot give {expression}: {cause_of(value)}")
        try:
            return [receive(value) for value in found]
        except Exception as error:
            cause = ended(str(error))
            raise UserError(f"{expression} cannot be read in the notebook: {cause}") from error


def answers(
    cluster: Cluster,
    call: Call,
    timeout: float = CALL_TIMEOUT_SECONDS,
    has_advanced: Callable[[], bool] = lambda: False,
) -> list[Any]:
    """Return what each rank answers, as ``Call.results``; raises a UserError when one does not."""
    try:
        return call.results(timeout, has_advanced)
    except TimeoutError as error:
        raise UserError(
            f"There was {error}: a cell may still run there; %ddp_why shows where it is, "
            "%ddp_interrupt stops it."
        ) from error
    except RuntimeError as error:
        cluster.require(call.ranks)  # if one has died, this raises the sentence about it
        raise UserError(f"There was no answer from {error}.") from error


def cause_of(failure: Failure) -> str:
    """Return a rank's error as the end of a sentence."""
    return ended(f"{failure.name}: {failure.text}")


def ended(text: str) -> str:
    """Return a text with the full stop that it may lack."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


@contextlib.contextmanager
def new_files(folder: Path, suffixes: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """Return a path in the run folder, and open new files there: the path with each suffix.

    They are removed at the end.  What has mapped one keeps its memory; who comes later finds none.
    """
    path = str(folder / f"{PREFIX}{secrets.token_hex(8)}")
    with contextlib.ExitStack() as stack:
        files = []
        for suffix in suffixes:
            file = os.open(f"{path}{suffix}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            stack.callback(os.close, file)
            stack.callback(Path(f"{path}{suffix}").unlink, missing_ok=True)
            files.append(file)
        yield path, files


def growing(files: Sequence[int]) -> Callable[[], bool]:
    """Return a function: has one of the files grown since the last call?"""
    sizes = [0] * len(files)

    def have_grown() -> bool:
        before, sizes[:] = sizes[:], [os.fstat(file).st_size for file in files]
        return sizes != before

    return have_grown


def remove_leftovers(folder: Path) -> None:
    """Remove the files of a kernel that ended during a call."""
    for path in folder.glob(f"{PREFIX}*"):
        path.unlink(missing_ok=True)


def own_classes() -> tuple[str, ...]:
    """Return the names of the classes that the notebook's cells have defined."""
    variables = vars(sys.modules["__main__"]).items()
    return tuple(
        name
        for name, value in list(variables)
        if isinstance(value, type) and value.__module__ == "__main__"
    )


def explain(variables: Mapping[str, object], error: Exception) -> str:
    """Return the sentence about the variable that cannot be pickled, and why."""
    name = ", ".join(variables)
    for each, value in variables.items():
        try:
            dump(value, for_ranks=True)
        except Exception as its_own:  # noqa: BLE001  whatever a user's class raises
            name, error = each, its_own
            break
    nothing = " Nothing was sent." if len(variables) > 1 else ""
    return f"{name} cannot be sent to the ranks: {ended(str(error))}{nothing}"
