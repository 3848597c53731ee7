"""Many tensors end to end, in one flat tensor for each dtype: what a collective takes (ranks)."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class FlatBuffer:
    """Room for tensors like these, laid end to end: one flat tensor for each dtype among them.

    It lies where the default group can send from: for gloo in the host's memory.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        device = torch.device("cpu") if dist.get_backend() == "gloo" else like[0].device
        sizes: Counter[torch.dtype] = Counter()
        for tensor in like:
            sizes[tensor.dtype] += tensor.numel()
        rest = {kind: torch.zeros(size, dtype=kind, device=device) for kind, size in sizes.items()}
        self.buffers = list(rest.values())
        """Shape (n,) each."""
        self.views: list[Tensor] = []
        """The part of a buffer for each tensor, in its shape, in the given order."""
        for tensor in like:
            view, rest[tensor.dtype] = rest[tensor.dtype].tensor_split([tensor.numel()])
            self.views.append(view.view(tensor.shape))

    @torch.no_grad()
    def gather(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors in."""
        for view, tensor in zip(self.views, tensors, strict=True):
            view.copy_(tensor)

    @torch.no_grad()
    def scatter(self, tensors: Iterable[Tensor]) -> None:
        """Copy them out, into these."""
        for view, tensor in zip(self.views, tensors, strict=True):
            tensor.copy_(view)

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over all ranks; takes part: every rank."""
        self.gather(tensors)
        for buffer in self.buffers:
            dist.all_reduce(buffer)
        self.scatter(tensors)
        for tensor in tensors:
            tensor /= dist.get_world_size()


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients; a parameter that had no part in the loss gets one of zeros."""
    found = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        found.append(parameter.grad)
    return found


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; of a sharded one, those on this rank."""
    return sum(tensor.numel() * tensor.element_size() for tensor in map(local, tensors))


def local(tensor: Tensor) -> Tensor:
    """Return the part on this rank, without an import of ``DTensor``, which takes a second."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
