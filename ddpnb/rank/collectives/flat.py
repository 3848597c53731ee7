"""Flat buffers store many tensors end to end, one buffer per dtype.  Runs on the ranks."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class FlatBuffer:
    """One flat buffer for each dtype, with a view for each of the given tensors.

    The buffers are on a device from which the default group can send (for gloo, the CPU).

    Args:
        like: tensors, usually parameters.
        has_flags: if True, the first buffer ends with a flag for each tensor.  After a sum over the
            ranks, a tensor's flag is the number of ranks that have a gradient for the tensor.
    """

    def __init__(self, like: Sequence[Tensor], *, has_flags: bool = False) -> None:
        device = torch.device("cpu") if dist.get_backend() == "gloo" else like[0].device
        sizes: Counter[torch.dtype] = Counter()
        for tensor in like:
            sizes[tensor.dtype] += tensor.numel()
        sizes[like[0].dtype] += len(like) if has_flags else 0
        rest = {kind: torch.zeros(size, dtype=kind, device=device) for kind, size in sizes.items()}
        self.tensors = like
        self.buffers = list(rest.values())
        """One tensor of shape (n,) for each dtype."""
        self.views: list[Tensor] = []
        """One view for each tensor, in the given order.  A view has the shape of its tensor."""
        for tensor in like:
            view, rest[tensor.dtype] = rest[tensor.dtype].tensor_split([tensor.numel()])
            self.views.append(view.view(tensor.shape))
        self._flags = rest[like[0].dtype]

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Copy the tensors' gradients into the buffers.  A missing gradient counts as zeros."""
        for view, tensor, flag in zip(self.views, self.tensors, self._flags, strict=True):
            flag.fill_(tensor.grad is not None)
            if tensor.grad is None:
                view.zero_()
            else:
                view.copy_(tensor.grad)

    @torch.no_grad()
    def scatter_gradients(self, tensors: Sequence[Tensor]) -> None:
        """Set the gradients of ``tensors`` from the buffers.

        If no rank has a gradient for a tensor, its gradient is None.  As in one process, an
        optimizer then skips the tensor.
        """
        for view, tensor, flag in zip(self.views, tensors, self._flags.tolist(), strict=True):
            if not flag:
                tensor.grad = None
            elif tensor.grad is None:
                tensor.grad = view.to(tensor.device, copy=True)
            else:
                tensor.grad.copy_(view)

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


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of tensors.  Count only this rank's part of a sharded tensor."""
    return sum(tensor.numel() * tensor.element_size() for tensor in map(local, tensors))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without importing ``DTensor`` (which takes a second)."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
