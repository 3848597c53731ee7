"""Which class is the strategy of a name?  (Every rank.)"""

from collections.abc import Mapping

from ddpnb.rank.strategies.async_ps import AsyncParameterServer
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.strategies.data_parallel import DataParallel
from ddpnb.rank.strategies.ddp import Ddp
from ddpnb.rank.strategies.single import Single

STRATEGIES: Mapping[str, type[Strategy]] = {
    "single": Single,
    "dp": DataParallel,
    "ddp": Ddp,
    "async": AsyncParameterServer,
}
"""The class of each name in ``wire.STRATEGIES``."""
