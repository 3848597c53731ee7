"""Probes: is a private part of a library as this code expects it?  (Every process.)

Private parts change without notice.  Each one in use has a probe, which runs when a rank or the
kernel's side of a cluster starts.  If it fails, one feature is off, and a sentence says so.
"""

from collections.abc import Callable, Iterable
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import final


@final
class Probe:
    """Checks once whether a private part is as expected.

    Args:
        library: its name in the package index.
        without: the consequence of a failure, as a clause without a full stop.
        check: returns False, or raises, if the part is not as expected.
    """

    def __init__(self, library: str, without: str, check: Callable[[], bool]) -> None:
        self._library = library
        self._without = without
        self._check = check

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


def probe(library: str, without: str) -> Callable[[Callable[[], bool]], Probe]:
    """Return a decorator that makes a ``Probe`` of its ``check``."""
    return lambda check: Probe(library, without, check)


def missing(probes: Iterable[Probe]) -> tuple[str, ...]:
    """Return the sentences of the probes that fail."""
    return tuple(each.sentence for each in probes if not each.works)


def sentence(library: str, without: str) -> str:
    """Return ``"torch 2.15.0: ..."``, what is missing with this version of a library."""
    return f"{library} {_version(library)}: {without}"


def _version(library: str) -> str:
    try:
        return version(library).partition("+")[0]
    except PackageNotFoundError:  # built from source, on a path of its own
        return "of unknown version"
