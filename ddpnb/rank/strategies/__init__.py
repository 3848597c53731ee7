"""The strategies, one file each, and how one is made from its name (every rank)."""

from collections.abc import Mapping

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.notation import parse_strategy
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.strategies.own import own_strategy


def make_strategy(word: str, namespace: Mapping[str, object]) -> Strategy:
    """Return the strategy that a word names, with its options.

    Args:
        word: as ``notation.parse_strategy`` reads it.
        namespace: where the user's own classes are looked up.

    Raises:
        UserError: there is no such strategy or option.
    """
    choice = parse_strategy(word)
    if choice.name not in STRATEGIES:
        return own_strategy(choice, namespace)
    made: Strategy = STRATEGIES[choice.name].load()(**choice.options)
    return made
