"""Which class is the strategy of a name?  (Every rank.)"""

import importlib
from collections.abc import Mapping

from ddpnb import catalogue
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.strategies.own import own_strategy


def strategy_class(name: str) -> type[Strategy]:
    """Return the class of a name in ``catalogue.STRATEGIES``; its module is imported now."""
    module, _, class_name = catalogue.STRATEGIES[name].class_path.partition(":")
    found: type[Strategy] = getattr(importlib.import_module(module), class_name)
    return found


def make_strategy(word: str, namespace: Mapping[str, object]) -> Strategy:
    """Return the strategy that a word names, with the options it gives.

    Args:
        word: as ``catalogue.strategy`` reads it.
        namespace: where a class of the user's own is looked up.

    Raises:
        UserError: there is no such strategy or option.
    """
    choice = catalogue.strategy(word)
    if choice.name not in catalogue.STRATEGIES:
        return own_strategy(choice, namespace)
    return strategy_class(choice.name)(**choice.options)
