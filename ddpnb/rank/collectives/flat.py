"""Flat buffers store many tensors end to end, one buffer per dtype.  Runs on the ranks."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class FlatBuffer:
    """One flat buffer for each dtype, with a view for each of the given tensors.

    With gloo, the buffers are on the CPU.  Otherwise they are on the first tensor's device.  Only
    ``average`` communicates.  The other methods copy tensors on this rank.

    Args:
        tensors: the tensors to pack, usually parameters.  The buffer keeps them.
        has_flags: if True, the first buffer ends with a flag for each tensor.  After a sum over the
            ranks, a tensor's flag is the number of ranks that have a gradient for the tensor.
    """

    def __init__(self, tensors: Sequence[Tensor], *, has_flags: bool = False) -> None:
        device = torch.device("cpu") if dist.get_backend() == "gloo" else tensors[0].device
        sizes: Counter[torch.dtype] = Counter()
        for tensor in tensors:
            sizes[tensor.dtype] += tensor.numel()
        sizes[tensors[0].dtype] += len(tensors) if has_flags else 0
        # rest: the part of each buffer that has no view yet
        rest = {kind: torch.zeros(size, dtype=kind, device=device) for kind, size in sizes.items()}
        self.tensors = tensors
        self.buffers = list(rest.values())
        """One tensor of shape (n,) for each dtype."""
        self.views: list[Tensor] = []
        """One view for each tensor, in the given order.  A view has the shape of its tensor."""
        for tensor in tensors:
            view, rest[tensor.dtype] = rest[tensor.dtype].tensor_split([tensor.numel()])
            self.views.append(view.view(tensor.shape))
        self._flags = rest[tensors[0].dtype]

    @torch.no_grad()
    def pack_gradients(self) -> None:
        """Copy the tensors' gradients into the buffers.  A missing gradient becomes zeros."""
        for view, tensor, flag in zip(self.views, self.tensors, self._flags, strict=True):
            flag.fill_(tensor.grad is not None)
            if tensor.grad is None:
                view.zero_()
            else:
                view.copy_(tensor.grad)

    @torch.no_grad()
    def unpack_gradients(self, tensors: Sequence[Tensor]) -> None:
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
    def pack(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors into the buffers."""
        for view, tensor in zip(self.views, tensors, strict=True):
            view.copy_(tensor)

    @torch.no_grad()
    def unpack(self, tensors: Iterable[Tensor]) -> None:
        """Copy the buffers into tensors."""
        for view, tensor in zip(self.views, tensors, strict=True):
            tensor.copy_(view)

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over all ranks.  Every rank takes part."""
        self.pack(tensors)
        for buffer in self.buffers:
            dist.all_reduce(buffer)
        self.unpack(tensors)
        for tensor in tensors:
            tensor /= dist.get_world_size()


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of tensors.  Count only this rank's part of a sharded tensor."""
    return sum(tensor.numel() * tensor.element_size() for tensor in map(local, tensors))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without importing ``DTensor`` (which takes a second)."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
