"""The strategies, one per file, and a function that creates them.  Runs on the ranks."""

from collections.abc import Mapping

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import parse_strategy
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.strategies.own import UserStrategy


def make_strategy(word: str, namespace: Mapping[str, object]) -> Strategy:
    """Create a built-in strategy or the user's strategy from its name and options.

    Raises:
        UserError: The strategy or option does not exist, or the user's class lacks a method.
    """
    choice = parse_strategy(word)
    if choice.name in STRATEGIES:
        built_in: Strategy = STRATEGIES[choice.name].load()(**choice.options)
        return built_in
    own = namespace.get(choice.name)
    if not hasattr(own, "setup"):
        for name, entry in STRATEGIES.items():
            if choice.name in entry.aliases or choice.name.lower() == name:
                raise UserError(f"{choice.name} is called {name} here. Write {name}.")
    if not isinstance(own, type):
        raise UserError(
            f"There is no strategy {choice.name!r}. To add it, define a class {choice.name} with "
            "setup, step and finish, in the comparison's cell or in an earlier %%ddp cell."
        )
    for method in ("setup", "step", "finish"):
        if not callable(getattr(own, method, None)):
            raise UserError(f"{choice.name} has no method {method}(). Add {method}() to the class.")
    try:
        made = own(**choice.options)
    except TypeError as error:
        raise UserError(f"The strategy {choice.name} cannot be created: {error}.") from error
    return made if isinstance(made, Strategy) else UserStrategy(made)
