"""Copies of variables between the notebook and the ranks (kernel).

They are serialized as ipyparallel does it, which handles functions defined in a cell and
large arrays, but travel as plain bytes: an unreadable value is then an error of this call,
and does not stop ipyparallel's client.  ``ddpnb.rank.calls`` is the other end.
"""

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from ddpnb.cluster.cluster import Cluster
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Failure, OnRank


def push(cluster: Cluster, variables: Mapping[str, object], ranks: Sequence[int]) -> None:
    """Put variables into the namespaces of ranks.

    Raises:
        UserError: they cannot be serialized, or not be read on a rank.
    """
    names = ", ".join(variables)
    try:
        packed = pack(variables)
    except Exception as error:
        raise UserError(f"{names} cannot be sent to the ranks: {error}.") from error
    for failure in gather(cluster, OnRank("push"), packed, ranks=ranks):
        if failure is not None:
            cause = f"{failure.name}: {failure.text}"
            raise UserError(f"{names} cannot be read on rank {failure.rank}: {cause}.")


def pull(cluster: Cluster, expression: str, ranks: Sequence[int]) -> list[Any]:
    """Return the value of an expression on each of some ranks.

    Raises:
        UserError: a rank cannot evaluate or send it, or it cannot be read here.
    """
    found = gather(cluster, OnRank("pull"), expression, ranks=ranks)
    for value in found:
        if isinstance(value, Failure):
            cause = f"{value.name}: {value.text}"
            raise UserError(f"Rank {value.rank} cannot give {expression}: {cause}.")
    try:
        return [unpack(value) for value in found]
    except Exception as error:
        raise UserError(f"{expression} cannot be read in the notebook: {error}.") from error


def gather(
    cluster: Cluster, function: OnRank, *arguments: object, ranks: Sequence[int]
) -> list[Any]:
    """Call a function on some ranks; advise the user when one does not answer."""
    try:
        return cluster.gather(function, *arguments, ranks=ranks)
    except TimeoutError as error:
        raise UserError(
            f"There was {error}: a cell may still run there; %ddp_why shows where it is, "
            "%ddp_interrupt stops it."
        ) from error


def pack(variables: Mapping[str, object]) -> bytes:
    """Serialize variables for ``push``; raises what pickle raises."""
    from ipyparallel.serialize import serialize_object  # noqa: PLC0415  0.3 s: once ranks run

    buffers = serialize_object(dict(variables), buffer_threshold=0)
    return pickle.dumps([bytearray(buffer) for buffer in buffers])  # writable where they arrive


def unpack(value: bytes) -> Any:
    """Deserialize a value from ``pull``; raises what pickle raises."""
    from ipyparallel.serialize import deserialize_object  # noqa: PLC0415  0.3 s: once ranks run

    (found,), _ = deserialize_object(pickle.loads(value))
    return found
