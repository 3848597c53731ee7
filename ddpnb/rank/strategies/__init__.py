"""Which strategy does a word name?  (Every rank.)"""

from collections.abc import Mapping

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.choices import parse_strategy
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.strategies.own import own_strategy


def make_strategy(word: str, namespace: Mapping[str, object]) -> Strategy:
    """Return the strategy that a word names, with the options it gives.

    Args:
        word: as ``choices.parse_strategy`` reads it.
        namespace: where a class of the user's own is looked up.

    Raises:
        UserError: there is no such strategy or option.
    """
    choice = parse_strategy(word)
    if choice.name not in STRATEGIES:
        return own_strategy(choice, namespace)
    made: Strategy = STRATEGIES[choice.name].load()(**choice.options)
    return made
