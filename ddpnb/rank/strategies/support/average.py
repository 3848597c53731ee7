"""How do all ranks take the mean of their weights?  (Every rank.)"""

from typing import final

import torch.distributed as dist

from ddpnb.rank.strategies.base import Replica
from ddpnb.rank.strategies.support.flat import Flat, all_reduce_bytes, gradients, meeting_place


@final
class Mean:
    """The mean over all ranks, of the parameters or of their gradients.

    Args:
        replica: whose they are; only what is trained is averaged.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._flat = Flat(replica.parameters, meeting_place(replica.device))

    def of_parameters(self) -> int:
        """Replace the parameters by their mean; takes part: every rank.

        Returns:
            The bytes that each rank sends.
        """
        parameters = self._replica.parameters
        self._flat.gather(parameters)
        num_sent = self._sum()
        for buffer in self._flat.buffers:
            buffer /= self._replica.world_size
        self._flat.scatter(parameters)
        return num_sent

    def of_weighted_gradients(self) -> int:
        """Replace the gradients by their sum, the mean of what came with weights that add up to 1.

        Takes part: every rank.

        Returns:
            The bytes that each rank sends.
        """
        mine = gradients(self._replica.parameters)
        self._flat.gather(mine)
        num_sent = self._sum()
        self._flat.scatter(mine)
        return num_sent

    def _sum(self) -> int:
        for buffer in self._flat.buffers:
            dist.all_reduce(buffer)
        return all_reduce_bytes(self._flat.num_bytes, self._replica.world_size)
