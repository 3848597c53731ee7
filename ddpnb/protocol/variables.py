"""Pickled variables, and how they cross: in a message, or in a file in shared memory.

(Kernel, ranks.)  Cloudpickle takes what notebooks hold: classes and functions of cells travel with
their code.  The memory of large arrays and tensors stays out of the pickle: the sender writes it
once, and the receiver maps it, so that a page is copied only when it is changed: whatever arrives
together stays until the last of it is dropped.
"""

import importlib
import io
import math
import mmap
import os
import pickle
import shutil
import sys
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import cloudpickle
import psutil

from ddpnb.compat.cloudpickle_internals import use_namespace

LARGE_BYTES = 2**16
"""Arrays of as many bytes stay out of the pickle, and variables of as many travel in a file."""
MAPPED_BYTES = 2**24
"""Files of as many bytes are mapped; each mapping holds a file descriptor.  Others are read."""
ALIGNED_BYTES = 64
"""Each part of a file begins at a multiple of it."""

NOTEBOOK_FUNCTIONS = ("ddpnb.rank.variables", "notebook_functions")
"""What a cell imports, from where, that stands for functions of the notebook."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Pickled variables on their way."""

    parts: tuple[bytes, ...] = ()
    """The pickle, then the arrays that are not in it; empty if they are in a file."""
    path: str = ""
    sizes: tuple[int, ...] = ()
    """The bytes of each part in the file."""


# -- pickling ------------------------------------------------------------------------------


def dump(value: object, *, for_ranks: bool, classes: Collection[str] = ()) -> list[memoryview]:
    """Return the pickle of a value, and the memory of its large arrays.

    Args:
        value: what the user names.
        for_ranks: the notebook's functions will see the rank's variables as their globals, and
            tensors stay on the kind of device that they are on.  Otherwise functions have globals
            of their own, and tensors arrive on the CPU.
        classes: names of classes of ``__main__`` that the receiver has, and takes its own for.
    """
    file = io.BytesIO()
    pickler = VariablePickler(file, for_ranks=for_ranks, classes=classes)
    pickler.dump(value)
    return [file.getbuffer(), *pickler.buffers]


class VariablePickler(cloudpickle.Pickler):  # type: ignore[misc]  # has no type hints
    """Pickles what a notebook holds; ``buffers`` are the arrays that are not in the pickle."""

    def __init__(self, file: io.BytesIO, *, for_ranks: bool, classes: Collection[str]) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._take)
        self.buffers: list[memoryview] = []
        self._for_ranks = for_ranks
        self._classes = classes
        if for_ranks:
            use_namespace(self, vars(sys.modules["__main__"]), main_namespace)

    def reducer_override(self, obj: Any) -> Any:
        """Take the memory of tensors as it lies, and refuse open files."""
        kind = type(obj)
        torch = sys.modules.get("torch")  # the kernel need not have it
        if torch is not None and isinstance(obj, torch.Tensor):
            return reduce_tensor(obj, torch, stays=self._for_ranks)
        if kind is io.TextIOWrapper and obj not in (sys.__stdout__, sys.__stderr__):
            raise TypeError("cannot pickle an open file")  # cloudpickle would copy its text
        is_main = isinstance(obj, type) and obj.__module__ == "__main__"
        if is_main and obj.__qualname__ in self._classes:
            return own_class, (obj.__qualname__,)
        return super().reducer_override(obj)

    def _take(self, buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes < LARGE_BYTES:
            return True  # into the pickle
        self.buffers.append(memory)
        return False


def main_namespace() -> dict[str, Any]:
    """Return the variables of the notebook, or, on a rank, those of its cells or of ``load``."""
    found = _namespace.get()
    return vars(sys.modules["__main__"]) if found is None else found


_namespace: ContextVar[dict[str, Any] | None] = ContextVar("namespace", default=None)


def own_class(name: str) -> Any:
    """Return the class of ``__main__`` with a name."""
    return vars(sys.modules["__main__"])[name]


def reduce_tensor(tensor: Any, torch: Any, *, stays: bool) -> Any:
    """Reduce a tensor to the memory of its elements in their order, a copy where they lie apart.

    Of those that torch reduces itself, the ones on a GPU are copied from it unless they stay.
    """
    kind, device = type(tensor), tensor.device.type
    if kind is torch.nn.Parameter:
        return NotImplemented  # torch reduces it to the tensor that it holds
    is_plain = kind is torch.Tensor and tensor.layout is torch.strided and not vars(tensor)
    if not is_plain or tensor.is_quantized or tensor.is_nested or device not in ("cpu", "cuda"):
        leaves = device == "cuda" and not stays
        return tensor.cpu().__reduce_ex__(5) if leaves else NotImplemented
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    memory = pickle.PickleBuffer(values.flatten().view(torch.uint8).numpy())
    device = device if stays else "cpu"
    shape = tuple(values.shape)
    return rebuild_tensor, (memory, values.dtype, shape, tensor.requires_grad, device)


def rebuild_tensor(
    memory: Any, dtype: Any, shape: tuple[int, ...], requires_grad: bool, device: str
) -> Any:
    """Return a tensor over ``memory``; on a GPU, a copy of it on the process's own device."""
    torch = importlib.import_module("torch")  # in the kernel, only for a tensor that it asked for
    if memoryview(memory).nbytes:
        tensor = torch.frombuffer(memory, dtype=dtype).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    return tensor.to(device).requires_grad_(requires_grad)


# -- sending and receiving -----------------------------------------------------------------


def packed(parts: Sequence[memoryview], path: str, *, num_copies: int = 1) -> Parcel:
    """Return a parcel of what was pickled: in the file ``path``, which exists, or in itself.

    It is in itself if it is small, if no file is named, or if the file's folder has no room.

    Raises:
        MemoryError: memory has no room for as many such files as there will be.
        FileNotFoundError: the file has been removed.
    """
    sizes = tuple(part.nbytes for part in parts)
    size = num_copies * sum(map(_aligned, sizes))
    is_large = bool(path) and sum(sizes) >= LARGE_BYTES
    if is_large and size > (free := psutil.virtual_memory().available):
        times = f" from each of {num_copies} ranks" if num_copies > 1 else ""
        each = size / num_copies / 1e9
        raise MemoryError(f"{each:.1f} GB{times}, and {free / 1e9:.1f} GB of memory are free")
    if not is_large or size > shutil.disk_usage(path).free:
        return Parcel(parts=tuple(map(bytes, parts)))
    with open(path, "r+b") as file:  # not created: where it is gone, nobody waits
        for part in parts:
            file.write(part)
            file.seek(_aligned(part.nbytes) - part.nbytes, os.SEEK_CUR)
        file.truncate()
    return Parcel(path=path, sizes=sizes)


def _aligned(size: int) -> int:
    return math.ceil(size / ALIGNED_BYTES) * ALIGNED_BYTES


def receive(parcel: Parcel) -> Any:
    """Unpickle a parcel; raises what unpickling raises.  Its arrays are writable and its own."""
    return load(opened(parcel))


def opened(parcel: Parcel) -> list[Any]:
    """Return the pickle in a parcel, and the memory of its arrays, writable and its own.

    A large file is mapped while its folder is at most half full.
    """
    if not parcel.path:
        return list(map(bytearray, parcel.parts))
    with open(parcel.path, "rb") as file:
        total, _, free = shutil.disk_usage(parcel.path)
        is_mapped = sum(parcel.sizes) >= MAPPED_BYTES and 2 * free >= total
        read = (
            mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) if is_mapped else bytearray(file.read())
        )
    begins = [0, *accumulate(map(_aligned, parcel.sizes))]
    pairs = zip(begins, parcel.sizes, strict=False)
    return [memoryview(read)[begin : begin + size] for begin, size in pairs]


def load(parts: Sequence[Any], namespace: dict[str, Any] | None = None) -> Any:
    """Unpickle the parts of a parcel, which what is loaded shares from then on.

    Functions of the notebook find their global variables in ``namespace``, and bring those along
    that they use; by default they are those of ``__main__``.
    """
    stream, *buffers = parts
    token = _namespace.set(namespace)
    try:
        return pickle.loads(stream, buffers=buffers)
    finally:
        _namespace.reset(token)
