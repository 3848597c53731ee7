"""Pickles variables, and sends them in a message or in a file in shared memory.

Cloudpickle also pickles the code of classes and functions of cells.  The memory of large arrays and
tensors stays out of the pickle.  The sender writes this memory once, and the receiver maps it
copy-on-write.  The mapping exists until the last array or tensor in it is freed.
Runs in the kernel and on the ranks.
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
"""Minimum size of arrays outside the pickle.  Also the minimum size of variables sent in a file."""
MAPPED_BYTES = 2**24
"""Minimum size of files that are mapped.  Smaller files are read, to save file descriptors."""
ALIGNED_BYTES = 64
"""Each part of a file begins at a multiple of this number of bytes."""

NOTEBOOK_FUNCTIONS = ("ddpnb.rank.variables", "notebook_functions")
"""The module and the function that a cell imports to get functions of the notebook."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Pickled variables, ready to send."""

    parts: tuple[bytes, ...] = ()
    """The pickle, then the arrays outside the pickle.  Empty if the file ``path`` has the parts."""
    path: str = ""
    sizes: tuple[int, ...] = ()


# -- pickling ------------------------------------------------------------------------------


def dump(value: object, *, for_ranks: bool, classes: Collection[str] = ()) -> list[memoryview]:
    """Return the pickle of a value, and the memory of its large arrays.

    Args:
        value: the value to pickle.
        for_ranks: if True, functions of the notebook use the rank's variables as globals, and
            tensors stay on their kind of device.  If False, functions are sent with their globals,
            and tensors arrive on the CPU.
        classes: names of ``__main__`` classes that the receiver replaces with its own classes.
    """
    file = io.BytesIO()
    pickler = VariablePickler(file, for_ranks=for_ranks, classes=classes)
    pickler.dump(value)
    return [file.getbuffer(), *pickler.buffers]


class VariablePickler(cloudpickle.Pickler):  # type: ignore[misc]  # has no type hints
    """Pickles values of notebooks.  ``buffers`` contains the arrays outside the pickle."""

    def __init__(self, file: io.BytesIO, *, for_ranks: bool, classes: Collection[str]) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._take)
        self.buffers: list[memoryview] = []
        self._for_ranks = for_ranks
        self._classes = classes
        if for_ranks:
            use_namespace(self, vars(sys.modules["__main__"]), main_namespace)

    def reducer_override(self, obj: Any) -> Any:
        """Keep the memory of tensors out of the pickle, and reject open files."""
        kind = type(obj)
        torch = sys.modules.get("torch")  # the kernel may run without torch
        if torch is not None and isinstance(obj, torch.Tensor):
            return reduce_tensor(obj, torch, stays=self._for_ranks)
        if torch is not None and isinstance(obj, torch.jit.ScriptModule):
            torch.jit.save(obj, content := io.BytesIO())
            return load_script, (content.getvalue(),)
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
    """Return the namespace that ``load_parts`` uses, by default the variables of ``__main__``."""
    found = _namespace.get()
    return vars(sys.modules["__main__"]) if found is None else found


_namespace: ContextVar[dict[str, Any] | None] = ContextVar("namespace", default=None)


def own_class(name: str) -> Any:
    """Return the class with this name from ``__main__`` of the process that unpickles."""
    return vars(sys.modules["__main__"])[name]


def load_script(content: bytes) -> Any:
    """Return a TorchScript module on the CPU, because pickle cannot pack TorchScript."""
    torch = importlib.import_module("torch")
    return torch.jit.load(io.BytesIO(content), map_location="cpu")


def reduce_tensor(tensor: Any, torch: Any, *, stays: bool) -> Any:
    """Reduce a tensor to the memory of its elements; copy the elements if they are not contiguous.

    Torch reduces special tensors itself, after a copy to the CPU if ``stays`` is False.
    """
    kind, device = type(tensor), tensor.device.type
    if kind is torch.nn.Parameter:
        return NotImplemented  # torch reduces the parameter to its tensor
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
    """Return a tensor that shares ``memory``.  On a GPU, the tensor has a copy of ``memory``."""
    torch = importlib.import_module("torch")  # in the kernel, only if the user pulls a tensor
    if memoryview(memory).nbytes:
        tensor = torch.frombuffer(memory, dtype=dtype).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    return tensor.to(device).requires_grad_(requires_grad)


# -- sending and receiving -----------------------------------------------------------------


def packed(parts: Sequence[memoryview], path: str, *, num_copies: int = 1) -> Parcel:
    """Return a parcel, and store the pickled parts in it or in the existing file ``path``.

    The parcel stores the parts if they are small, if ``path`` is empty, or if the disk is full.

    Raises:
        MemoryError: the free memory is too small for ``num_copies`` files of this size.
        FileNotFoundError: the file has been removed.
    """
    sizes = tuple(part.nbytes for part in parts)
    size = num_copies * sum(map(_aligned, sizes))
    is_large = bool(path) and sum(sizes) >= LARGE_BYTES
    if is_large and size > (free := psutil.virtual_memory().available):
        times = f" for each of {num_copies} ranks" if num_copies > 1 else ""
        each = size / num_copies / 1e9
        raise MemoryError(
            f"it needs {each:.1f} GB{times}, but {free / 1e9:.1f} GB of memory are free"
        )
    if not is_large or size > shutil.disk_usage(path).free:
        return Parcel(parts=tuple(map(bytes, parts)))
    with open(path, "r+b") as file:  # if the file is gone, no receiver waits: do not create it
        for part in parts:
            file.write(part)
            file.seek(_aligned(part.nbytes) - part.nbytes, os.SEEK_CUR)
        file.truncate()
    return Parcel(path=path, sizes=sizes)


def _aligned(size: int) -> int:
    return math.ceil(size / ALIGNED_BYTES) * ALIGNED_BYTES


def receive(parcel: Parcel) -> Any:
    """Unpickle a parcel; errors are not caught.  The arrays are writable copies."""
    return load_parts(opened(parcel))


def opened(parcel: Parcel) -> list[Any]:
    """Return the pickle of a parcel, and writable private memory of the parcel's arrays.

    A large file is mapped if the file's disk is at most half full.
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


def load_parts(parts: Sequence[Any], namespace: dict[str, Any] | None = None) -> Any:
    """Unpickle the parts of a parcel.  The loaded arrays share the memory of these parts.

    Functions of the notebook use ``namespace`` as global variables.  Unpickling adds the variables
    that were sent with the functions.  By default, functions use the variables of ``__main__``.
    """
    stream, *buffers = parts
    token = _namespace.set(namespace)
    try:
        return pickle.loads(stream, buffers=buffers)
    finally:
        _namespace.reset(token)
