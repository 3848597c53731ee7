"""Many tensors in few messages: flat buffers (ranks)."""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class FlatBuffer:
    """Tensors laid end to end: one flat tensor for each dtype among them.

    It lies where the default group can send from: for gloo in the host's memory.

    Args:
        like: gives shapes, dtypes and device; at least one.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        device = torch.device("cpu") if dist.get_backend() == "gloo" else like[0].device
        sizes: dict[torch.dtype, int] = {}
        for tensor in like:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
        by_dtype = {
            dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in sizes.items()
        }
        self.buffers = list(by_dtype.values())
        """Shape (n,) each."""
        self.views: list[Tensor] = []
        """The part of a buffer for each tensor, in its shape, in the given order."""
        rest = dict(by_dtype)
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

    def sum(self, tensors: Sequence[Tensor]) -> int:
        """Replace tensors by their sums over all ranks; takes part: every rank.

        Returns:
            The bytes that each rank sends.
        """
        self.gather(tensors)
        for buffer in self.buffers:
            dist.all_reduce(buffer)
        self.scatter(tensors)
        return all_reduce_bytes(self.num_bytes, dist.get_world_size())

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> int:
        """Replace tensors by their means over all ranks; takes part: every rank.

        Returns:
            The bytes that each rank sends.
        """
        num_sent = self.sum(tensors)
        for tensor in tensors:
            tensor /= dist.get_world_size()
        return num_sent

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return num_bytes(self.buffers)


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients; the backward pass must have made all of them."""
    found = [parameter.grad for parameter in parameters]
    assert all(gradient is not None for gradient in found), "a parameter has no gradient"
    return [gradient for gradient in found if gradient is not None]


def all_reduce_bytes(size: int, world_size: int) -> int:
    """Return what each rank sends in an all-reduce of ``size`` bytes: 2 (N - 1) / N of them.

    No all-reduce can do with less on every rank (Patarasuk and Yuan, 2009).
    """
    return 2 * (world_size - 1) * size // world_size


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; of a sharded one, those on this rank."""
    return sum(tensor.numel() * tensor.element_size() for tensor in map(_local, tensors))


def _local(tensor: Tensor) -> Tensor:
    """Return the part on this rank, without an import of ``DTensor``, which takes a second."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
