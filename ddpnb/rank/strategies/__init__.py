"""The strategies, one file each, and how one is made from its name (every rank)."""

from collections.abc import Mapping

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import parse_strategy
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.strategies.own import UserStrategy


def make_strategy(word: str, namespace: Mapping[str, object]) -> Strategy:
    """Return the strategy that a word names, with its options; a class of the user's own too.

    Raises:
        UserError: there is no such strategy or option, or the user's class lacks a method.
    """
    choice = parse_strategy(word)
    if choice.name in STRATEGIES:
        built_in: Strategy = STRATEGIES[choice.name].load()(**choice.options)
        return built_in
    own = namespace.get(choice.name)
    if not hasattr(own, "setup"):
        for name, entry in STRATEGIES.items():
            if choice.name in entry.aliases or choice.name.lower() == name:
                raise UserError(f"{choice.name} is called {name} here: write that.")
    if not isinstance(own, type):
        raise UserError(
            f"There is no strategy {choice.name!r}: define a class of that name with setup, step "
            "and finish, in the comparison's cell or in a %%ddp cell before it."
        )
    for method in ("setup", "step", "finish"):
        if not callable(getattr(own, method, None)):
            raise UserError(f"{choice.name} has no {method}(); a strategy needs it.")
    try:
        made = own(**choice.options)
    except TypeError as error:
        raise UserError(f"{choice.name} cannot be made: {error}.") from error
    return made if isinstance(made, Strategy) else UserStrategy(made)
