"""Private parts of cloudpickle.  (Kernel, which pushes functions; ranks.)"""

import pickle
from functools import partial
from io import BytesIO
from typing import Any

import cloudpickle

from ddpnb.compat.probe import Probe


class Namespace:
    """Stands for a dict of global variables, in a pickle; unpickled, it is what ``get`` returns."""

    def __init__(self, get: Any) -> None:
        self._get = get

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Have the receiver look the namespace up."""
        return self._get, ()


def use_namespace(pickler: cloudpickle.Pickler, variables: dict[str, Any], get: Any) -> None:
    """Have functions with the globals ``variables`` use, once unpickled, what ``get`` returns.

    Cloudpickle would give them globals of their own.  Those that a function uses are pickled with
    it, and written into the namespace.
    """
    if shares_globals.works:
        pickler.globals_ref[id(variables)] = Namespace(get)


@Probe("cloudpickle", "a function that was pushed does not see the variables of the ranks")
def shares_globals() -> bool:
    """Whether functions can be given other globals when they are unpickled."""
    file, variables = BytesIO(), {"__name__": "__main__"}
    pickler = cloudpickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.globals_ref[id(variables)] = Namespace(partial(dict, tried=True))
    pickler.dump(eval("lambda: 0", variables))
    return "tried" in pickle.loads(file.getvalue()).__globals__
