"""Uses private parts of cloudpickle to send functions.  Runs in the kernel and on the ranks."""

import pickle
from functools import partial
from io import BytesIO
from typing import Any

import cloudpickle

from ddpnb.compat.probe import Probe


class Namespace:
    """A placeholder for a function's globals.  Unpickling replaces the placeholder by ``get()``."""

    def __init__(self, get: Any) -> None:
        self._get = get

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Make the receiver call ``get``."""
        return self._get, ()


def use_namespace(pickler: cloudpickle.Pickler, variables: dict[str, Any], get: Any) -> None:
    """Make unpickled functions use the dict from ``get()`` as globals instead of ``variables``.

    Otherwise cloudpickle would create new globals for the functions.  The globals that a function
    uses are pickled with the function and written into the dict that ``get()`` returns.
    """
    if shares_globals.works:
        pickler.globals_ref[id(variables)] = Namespace(get)


@Probe("cloudpickle", "a pushed function cannot use the ranks' variables")
def shares_globals() -> bool:
    """Return True if functions can get other globals during unpickling."""
    file, variables = BytesIO(), {"__name__": "__main__"}
    pickler = cloudpickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.globals_ref[id(variables)] = Namespace(partial(dict, tried=True))
    pickler.dump(eval("lambda: 0", variables))
    return "tried" in pickle.loads(file.getvalue()).__globals__
