"""In what form are a million events held and stored?  (Notebook side.)

As a numpy structured array: 76 bytes an event, as the rank has packed them.  The
same bytes go into the store, so nothing is ever pickled.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpnb.wire import EventBatch, Parts

Floats = NDArray[np.float64]

Records = NDArray[Any]
"""A structured array: one row per event, one named field per column."""

EVENT = np.dtype(
    [
        ("seconds", "<f8"),
        ("loss", "<f8"),
        ("num_samples", "<i8"),
        ("step", "<i8"),
        ("staleness", "<i4"),
        ("rank", "<i4"),
        ("num_bytes_sent", "<i8"),
        *((part, "<f4") for part in Parts._fields),
    ]
)
"""One step of one worker, as ``wire.pack_step`` packs it.

Little-endian, so that a stored run can be read anywhere.  The parts of the step, ``data``
to ``hidden``, are seconds.
"""

METRIC = np.dtype([("event", "<i8"), ("value", "<f8")])
"""One number of the user's own, and the index of the event that it belongs to."""


def rows_of(batch: EventBatch) -> Records:
    """Return what a rank flushed as rows, read-only and without a copy."""
    return np.frombuffer(batch.rows, dtype=EVENT)
