"""How does a variable travel between the notebook and a rank?  (Notebook side.)

As ipyparallel would send it, so that functions defined in a cell and large arrays can
go, but as plain bytes: what one side cannot read is then the caller's to tell, where it
would stop ipyparallel's client.  ``ddpnb.rank.calls`` is the other end.
"""

import pickle
from collections.abc import Mapping
from typing import Any


def pack(variables: Mapping[str, object]) -> bytes:
    """Return variables as bytes for ``push``; raises what pickle raises."""
    from ipyparallel.serialize import serialize_object  # noqa: PLC0415  0.3 s: once ranks run

    buffers = serialize_object(dict(variables), buffer_threshold=0)
    return pickle.dumps([bytearray(buffer) for buffer in buffers])  # writable where they arrive


def unpack(value: bytes) -> Any:
    """Return a value that ``pull`` brought; raises what pickle raises."""
    from ipyparallel.serialize import deserialize_object  # noqa: PLC0415  0.3 s: once ranks run

    (found,), _ = deserialize_object(pickle.loads(value))
    return found
