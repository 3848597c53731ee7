"""Which class is the strategy of a name?  (Every rank.)"""

from collections.abc import Mapping

from ddpnb import catalogue
from ddpnb.rank.strategies.async_ps import AsyncParameterServer
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.strategies.central import Central
from ddpnb.rank.strategies.data_parallel import DataParallel
from ddpnb.rank.strategies.ddp import Ddp
from ddpnb.rank.strategies.ddp_by_hand import DdpByHand
from ddpnb.rank.strategies.ddp_shm import DdpShm
from ddpnb.rank.strategies.diloco import DiLoCo
from ddpnb.rank.strategies.fsdp import Fsdp
from ddpnb.rank.strategies.gossip import Gossip
from ddpnb.rank.strategies.hogwild import Hogwild
from ddpnb.rank.strategies.local_sgd import LocalSgd
from ddpnb.rank.strategies.no_comm import NoComm
from ddpnb.rank.strategies.own import own_strategy
from ddpnb.rank.strategies.ring_by_hand import RingByHand
from ddpnb.rank.strategies.single import Single
from ddpnb.rank.strategies.zero import Zero

STRATEGIES: Mapping[str, type[Strategy]] = {
    "single": Single,
    "dp": DataParallel,
    "ddp": Ddp,
    "ddp-shm": DdpShm,
    "ddp-by-hand": DdpByHand,
    "ring-by-hand": RingByHand,
    "central": Central,
    "async": AsyncParameterServer,
    "hogwild": Hogwild,
    "local-sgd": LocalSgd,
    "diloco": DiLoCo,
    "zero": Zero,
    "fsdp": Fsdp,
    "gossip": Gossip,
    "no-comm": NoComm,
}
"""The class of each name in ``catalogue.STRATEGIES``."""


def make_strategy(word: str, namespace: Mapping[str, object]) -> Strategy:
    """Return the strategy that a word names, with the options it gives.

    Args:
        word: as ``catalogue.strategy`` reads it.
        namespace: where a class of the user's own is looked up.

    Raises:
        UserError: there is no such strategy or option.
    """
    choice = catalogue.strategy(word)
    if choice.name not in STRATEGIES:
        return own_strategy(choice, namespace)
    return STRATEGIES[choice.name](**choice.options)
