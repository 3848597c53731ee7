"""Flat buffers store many tensors end to end, one buffer per dtype.  Runs on the ranks."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class FlatBuffer:
    """One flat buffer for each dtype, with a view for each of the given tensors.

    The buffers are on a device from which the default group can send (for gloo, the CPU).
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        device = torch.device("cpu") if dist.get_backend() == "gloo" else like[0].device
        sizes: Counter[torch.dtype] = Counter()
        for tensor in like:
            sizes[tensor.dtype] += tensor.numel()
        rest = {kind: torch.zeros(size, dtype=kind, device=device) for kind, size in sizes.items()}
        self.tensors = like
        self.buffers = list(rest.values())
        """One tensor of shape (n,) for each dtype."""
        self.views: list[Tensor] = []
        """One view for each tensor, in the given order.  A view has the shape of its tensor."""
        for tensor in like:
            view, rest[tensor.dtype] = rest[tensor.dtype].tensor_split([tensor.numel()])
            self.views.append(view.view(tensor.shape))

    @torch.no_grad()
    def gather(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors into the buffers."""
        for view, tensor in zip(self.views, tensors, strict=True):
            view.copy_(tensor)

    @torch.no_grad()
    def scatter(self, tensors: Iterable[Tensor]) -> None:
        """Copy the buffers into tensors."""
        for view, tensor in zip(self.views, tensors, strict=True):
            tensor.copy_(view)

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over all ranks.  Every rank takes part."""
        self.gather(tensors)
        for buffer in self.buffers:
            dist.all_reduce(buffer)
        self.scatter(tensors)
        for tensor in tensors:
            tensor /= dist.get_world_size()


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients.  A parameter without a gradient gets a gradient of zeros."""
    found = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        found.append(parameter.grad)
    return found


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of tensors.  Count only this rank's part of a sharded tensor."""
    return sum(tensor.numel() * tensor.element_size() for tensor in map(local, tensors))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without importing ``DTensor`` (which takes a second)."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
