"""Private parts of cloudpickle.  (Kernel, which pushes functions; ranks.)"""

import pickle
from io import BytesIO
from typing import Any
from weakref import WeakSet

import cloudpickle

from ddpnb.compat.probe import missing, probe


class Namespace:
    """Stands for a dict of global variables, in a pickle; unpickled, it is what ``get`` returns."""

    def __init__(self, get: Any) -> None:
        self._get = get

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Have the receiver look the namespace up."""
        return self._get, ()


def use_namespace(
    pickler: cloudpickle.Pickler, variables: dict[str, Any], namespace: Namespace
) -> None:
    """Have functions with the globals ``variables`` find theirs in ``namespace``, once unpickled.

    Cloudpickle would give them globals of their own.  Those that a function uses are pickled with
    it, and written into the namespace.
    """
    if shares_globals.works:
        pickler.globals_ref[id(variables)] = namespace


@probe("cloudpickle", "a function that was pushed does not see the variables of the ranks")
def shares_globals() -> bool:
    """Whether functions can be given other globals when they are unpickled."""
    file, variables = BytesIO(), {"__name__": "__main__"}
    pickler = cloudpickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.globals_ref[id(variables)] = Namespace(_tried)
    pickler.dump(eval("lambda: 0", variables))
    return bool(pickle.loads(file.getvalue()).__globals__ is TRIED)


TRIED: dict[str, Any] = {}


def _tried() -> dict[str, Any]:
    return TRIED


OWN: WeakSet[type] = WeakSet()
"""Classes that this process has defined and sent."""
RECEIVED: WeakSet[type] = WeakSet()
"""Classes that another process has defined."""


def note_sent(kind: type) -> None:
    """Note that a class is pickled with its code: should it come back, it stays as it is."""
    if kind not in RECEIVED:
        OWN.add(kind)


class Unpickler(pickle.Unpickler):
    """Unpickles what cloudpickle has pickled, and leaves classes alone that are this process's own.

    Cloudpickle recognizes a class that comes back to where it was defined, but would replace all
    its attributes by copies, which no longer see the variables there.
    """

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Look a global up, as the base class does."""
        found = super().find_class(module_name, global_name)
        if knows_classes.works and found is cloudpickle.cloudpickle._class_setstate:
            return _fill
        return found


def _fill(kind: type, state: Any) -> type:
    if kind not in OWN:
        RECEIVED.add(kind)
        cloudpickle.cloudpickle._class_setstate(kind, state)
    return kind


@probe("cloudpickle", "pulling an object of a notebook's class may change the class")
def knows_classes() -> bool:
    """Whether it can be seen when a class gets its attributes."""
    return callable(cloudpickle.cloudpickle._class_setstate)


def missing_features() -> tuple[str, ...]:
    """Return a sentence for each feature that is off with this version of cloudpickle."""
    return missing((shares_globals, knows_classes))
