"""What does PowerSGD remember from step to step, and over a resume?  (Every rank.)

For each bucket of gradients torch's hook keeps what its last product left out, which is added
to the next gradients, and the two thin matrices, from which the next product begins.  They lie
one parameter after the other, as in the bucket; and DDP forms its buckets anew after its first
step.  So all of this is taken apart where a bucket has changed, and put together as it is now.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    _should_compress,
    powerSGD_hook,
)

from ddpnb.errors import UserError
from ddpnb.rank.strategies.base import Replica, State

NUM_PLAIN_STEPS: Final = 2
"""Steps before PowerSGD compresses: DDP forms its final buckets after the first."""

Piece = list[Tensor]
"""Of one parameter: what was left out, and both thin matrices, flat; empty where it has none."""


def check_matrices(replica: Replica) -> None:
    """Refuse what PowerSGD cannot send.

    Raises:
        UserError: a parameter has no rows, or there are several types on CPUs.
    """
    for name, parameter in replica.model.named_parameters():
        if parameter.requires_grad and (parameter.ndim == 0 or parameter.numel() == 0):
            raise UserError(
                f"ddp:hook=powersgd makes matrices of gradients, and {name}, of shape "
                f"{tuple(parameter.shape)}, has no rows: give it one, e.g. the shape (1,), "
                "or leave the hook out."
            )
    types = {parameter.dtype for parameter in replica.parameters}
    if replica.device.type == "cpu" and len(types) > 1:
        raise UserError(
            "ddp:hook=powersgd sends one bucket on CPUs, and torch makes one for each "
            "floating-point type: give the model one type, or leave the hook out."
        )


@final
class PowerMemory:
    """Torch's state of PowerSGD, which can be saved and loaded.

    Args:
        parameters: those that are trained.
        rank: of the thin matrices.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], rank: int) -> None:
        self.state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=NUM_PLAIN_STEPS,
        )
        self._parameters = parameters
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._orders: dict[int, list[int]] = {}
        """The numbers of each bucket's parameters, as they lie in torch's state."""
        self._pieces: dict[int, Piece] = {}
        """By the number of the parameter: what is in no bucket yet."""

    def hook(self, state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Send a bucket's gradients as torch's own hook does."""
        index = bucket.index()
        order = [self._numbers[id(parameter)] for parameter in bucket.parameters()]
        if self._orders.get(index, order) != order:
            self._pieces = self._apart()
            self._orders = {}
            for remembered in self._remembered():
                remembered.clear()
        if index not in self._orders:
            self._orders[index] = order
            self._put_together(index)
        return powerSGD_hook(state, bucket)

    def save(self) -> State:
        """Return all that is remembered."""
        return {"num_steps": self.state.iter, "pieces": self._pieces | self._apart()}

    def load(self, saved: State) -> None:
        """Remember what was saved; nothing, where that is empty."""
        if saved:
            device = self._parameters[0].device
            self.state.iter = saved["num_steps"]
            self._pieces = {
                number: [part.to(device) for part in piece]
                for number, piece in saved["pieces"].items()
            }

    def _apart(self) -> dict[int, Piece]:
        """Return what is remembered of each parameter."""
        pieces: dict[int, Piece] = defaultdict(list)
        for index, order in self._orders.items():
            for kind, remembered in enumerate(self._remembered()):
                if index in remembered:
                    lying = self._as_lying(order, kind)
                    sizes = [self._sizes(number)[kind] for number in lying]
                    parts = remembered[index].split(sizes)
                    for number, part in zip(lying, parts, strict=True):
                        pieces[number].append(part.clone())
        return dict(pieces)

    def _put_together(self, index: int) -> None:
        """Give a bucket what is remembered of its parameters, where all of them have some."""
        order = self._orders[index]
        if not self._pieces.keys() >= set(order):
            return
        for kind, remembered in enumerate(self._remembered()):
            lying = self._as_lying(order, kind)
            remembered[index] = torch.cat([self._pieces[number][kind] for number in lying])
        for number in order:
            del self._pieces[number]

    def _remembered(self) -> tuple[dict[int, Tensor], ...]:
        return self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict

    def _as_lying(self, order: Sequence[int], kind: int) -> list[int]:
        """Return parameters as torch lays them: thin matrices of one shape beside each other."""
        if kind == 0:
            return list(order)
        shapes = list(dict.fromkeys(map(self._shape, order)))
        return sorted(order, key=lambda number: shapes.index(self._shape(number)))

    def _shape(self, number: int) -> tuple[int, int]:
        """Return a parameter's rows and columns, as torch makes a matrix of it."""
        parameter = self._parameters[number]
        return parameter.shape[0], parameter.numel() // parameter.shape[0]

    def _sizes(self, number: int) -> tuple[int, int, int]:
        """Return how many values of a parameter are remembered, of each kind."""
        num_rows, num_columns = self._shape(number)
        rank = min(num_rows, num_columns, self.state.matrix_approximation_rank)
        rate = self.state.min_compression_rate
        is_compressed, *_ = _should_compress(num_rows, num_columns, rank, rate)
        rank *= is_compressed
        return num_rows * num_columns, num_rows * rank, num_columns * rank
