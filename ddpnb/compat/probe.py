"""Probes: is a private part of a library as this code expects it?  (Every process.)

Private parts change without notice.  Each one in use has a probe, which runs when a rank or the
kernel's side of a cluster starts.  If it fails, one feature is off, and a sentence says so.
"""

from collections.abc import Callable
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Self, final

PROBES: list["Probe"] = []
"""Those of all modules of ``compat`` that this process has imported."""


@final
class Probe:
    """Decorates a check of whether a private part is as expected.

    ``without`` is the consequence of a failure, as a clause without a full stop.
    """

    def __init__(self, library: str, without: str) -> None:
        self._library = library
        self._without = without
        PROBES.append(self)

    def __call__(self, check: Callable[[], bool]) -> Self:
        """Take the check, which returns False, or raises, if the part is not as expected."""
        self._check = check
        return self

    @cached_property
    def works(self) -> bool:
        """Whether the feature can be used."""
        try:
            return self._check()
        except Exception:  # noqa: BLE001  whatever a version unknown here raises
            return False

    @property
    def sentence(self) -> str:
        """The sentence for the user if the probe fails."""
        return sentence(self._library, self._without)


def missing_features() -> tuple[str, ...]:
    """Return a sentence for each feature that is off in this process."""
    return tuple(each.sentence for each in PROBES if not each.works)


def sentence(library: str, without: str) -> str:
    """Return ``"torch 2.15.0: ..."``, what is missing with this version of a library."""
    try:
        return f"{library} {version(library).partition('+')[0]}: {without}"
    except PackageNotFoundError:  # built from source, on a path of its own
        return f"{library} of unknown version: {without}"
