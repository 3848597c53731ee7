"""What does autograd keep of a forward pass until the backward pass?  (Ranks.)"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ddpnb.rank.collectives.flat import local


@final
class Activations:
    """Measures one forward pass, and leaves all others alone."""

    def __init__(self, *, is_due: bool = False) -> None:
        self.is_due = is_due
        """Whether the next forward pass is measured."""
        self.num_bytes = 0
        """What autograd kept of it, without the parameters; 0: not known."""
        self._kept: dict[int, torch.UntypedStorage] = {}

    def of(self, forward: Callable[[], Tensor], model: nn.Module) -> Tensor:
        """Return the loss of the forward pass through a model that is measured."""
        try:
            with self.hooks():
                loss = forward()
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            self.is_due = False  # the functions of torch.func refuse such hooks
            return forward()
        for parameter in map(local, model.parameters()):
            self._kept.pop(parameter.untyped_storage().data_ptr(), None)
        self.num_bytes = sum(storage.nbytes() for storage in self._kept.values())
        self.is_due, self._kept = False, {}
        return loss

    def hooks(self) -> AbstractContextManager[object]:
        """Return the context in which this thread's part of the forward pass is measured."""
        return saved_tensors_hooks(self._keep, lambda kept: kept) if self.is_due else nullcontext()

    def _keep(self, tensor: Tensor) -> Tensor:
        if (here := local(tensor)).layout == torch.strided:
            storage = here.untyped_storage()
            self._kept[storage.data_ptr()] = storage
        return tensor
