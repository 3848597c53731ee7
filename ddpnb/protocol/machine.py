"""What a machine can do, as its ranks measured it.  (Every process.)"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineQuery:
    """What the ranks are to measure."""

    model: str = ""
    """A variable on the ranks; empty: no model is measured."""
    input: str = ""
    """What the model is called with, an expression on the ranks."""
    name: str
    """Of this measurement; no two share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMeasured:
    """Forward and backward pass of a model on one rank, without its own update."""

    num_parameters: int
    num_bytes: int
    """Of the parameters that are trained."""
    num_samples: int
    seconds: float
    num_fewer: int
    """A smaller batch, for what a step costs however small it is; 0: there was none."""
    fewer_seconds: float


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
    shared_latency: float
    """The same through shared memory; 0 where ranks do not share any, or compute on GPUs."""
    shared_all_reduce: float
    has_peer_access: bool | None
    """Whether a GPU reads the next one's memory without the host; None: the host has no next."""
    model: ModelMeasured | None = None
