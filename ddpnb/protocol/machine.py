"""What a machine can do, as its ranks measured it.  (Every process.)"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasured:
    """What one rank measured; rates in units per second, 0 where there is no such thing."""

    rank: int
    host: str
    device: str
    device_name: str
    backend: str
    flops: float
    """Multiply-adds of float32 matrices count twice; all ranks at once."""
    flops_alone: float
    """The same on rank 0 while the others rest; 0 on the others."""
    latency: float
    """Seconds of an all-reduce of one number."""
    all_reduce_bytes: int
    all_reduce: float
    """Seconds of an all-reduce of so many bytes."""
    shared_all_reduce: float
    """The same through shared memory; 0 where ranks do not share any, or compute on GPUs."""
    has_peer_access: bool | None
    """Whether a GPU reads the next one's memory without the host; None: the host has no next."""
