"""Checks at the end of a synchronous run that all ranks have the same model.  Runs on the ranks."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpnb.protocol.errors import FEW
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.rank.collectives.flat import local
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.strategies.ddp import DdpStrategy


def disagreement(
    model: nn.Module, strategy: Strategy, frozen: Mapping[str, nn.Parameter]
) -> tuple[str, ...]:
    """Return warnings if ranks trained a parameter differently.  Every rank takes part.

    A user's strategy may train parameters in any way, so ddpnb compares only the results.
    ``frozen`` are the parameters that were frozen when the strategy was set up.
    """
    groups = strategy.optimizer.param_groups if hasattr(strategy, "optimizer") else []
    trained = {each for group in groups for each in group["params"]}
    thawed = [name for name, each in frozen.items() if each.requires_grad and each in trained]
    thawed += strategy.thawed
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    for name, each in model.named_parameters():
        is_averaged = isinstance(strategy, DdpStrategy) and each in trained
        if is_averaged and each.grad is not None:  # in zero, only the gradients may differ
            tensors[f"{name}.grad"] = each.grad
    dense = {n: each for n, each in tensors.items() if each.layout is torch.strided}
    mine = {name: _checksum(each) for name, each in dense.items()}
    dist.all_gather_object(every := [mine] * dist.get_world_size(), mine)
    notes = []
    if names := [n for n in every[0] if any(each.get(n) != every[0][n] for each in every)]:
        ranks = spoken_ranks([rank for rank, each in enumerate(every) if each != every[0]])
        notes.append(
            f"The replicas differ at the end: {ranks} and rank 0 have different values of "
            f"{', '.join(names[:FEW])}{' and more' * (len(names) > FEW)}. The scores are those of "
            "rank 0's model."
        )
    if thawed:
        notes.append(
            f"{thawed[0]} was frozen when the strategy wrapped the model, so its gradients are not "
            "averaged. Instead of freezing a layer at first, give it a learning rate of 0."
        )
    return tuple(notes)


@torch.no_grad()
def _checksum(tensor: Tensor) -> int:
    """Return the sum of a tensor's bits, read as integers."""
    flat = local(tensor).detach().contiguous().reshape(-1)
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    kinds = {1: torch.uint8, 2: torch.int16}
    return int(flat.view(kinds.get(flat.element_size(), torch.int32)).sum(dtype=torch.int64))
