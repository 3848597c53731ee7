"""Checks versions and private parts of the libraries that ddpnb uses.  Used in every process.

Private parts may change in any version, so each private part that ddpnb uses has a probe.  Probes
run when a rank or a cluster starts.  If a probe fails, ddpnb disables a feature and tells the user.
"""

import platform
import re
from collections.abc import Callable
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Self, final

LOWEST = {
    "ipython": "7.34",
    "ipykernel": "6.17",
    "ipyparallel": "8.8",
    "ipywidgets": "7.7",
    "torch": "2.8",
}
"""The lowest versions of libraries for which a failed import or call would not say the reason."""
PROBES: list["Probe"] = []
"""The probes of all modules of ``compat`` that this process has imported."""


@final
class Probe:
    """A decorator for a function that checks a private part of a library.

    ``without`` describes the consequence of a failed probe, as a clause without a full stop.
    """

    def __init__(self, library: str, without: str) -> None:
        self._library = library
        self._without = without
        PROBES.append(self)

    def __call__(self, check: Callable[[], bool]) -> Self:
        """Store a function that returns True if the private part works as expected."""
        self._check = check
        return self

    @cached_property
    def works(self) -> bool:
        """True if the private part works as expected."""
        try:
            return self._check()
        except Exception:  # noqa: BLE001  an unknown version may raise any error
            return False

    @property
    def sentence(self) -> str:
        """The sentence that tells the user that the probe failed."""
        return disabled_sentence(self._library, self._without)


def missing_features() -> tuple[str, ...]:
    """Return one sentence for each feature that is disabled because its probe failed."""
    return tuple(each.sentence for each in PROBES if not each.works)


def disabled_sentence(library: str, without: str) -> str:
    """Return a sentence such as ``"torch 2.15.0: ..."`` about a feature that is disabled."""
    return f"{library} {version_of(library).partition('+')[0] or 'of unknown version'}: {without}"


def version_of(library: str) -> str:
    """Return a library's version; ``""`` if it is not installed, even if Python can import it."""
    try:
        return version(library) if library != "Python" else platform.python_version()
    except PackageNotFoundError:
        return ""


@cache
def too_old() -> str:
    """Return a sentence about the libraries that are too old for ddpnb; ``""`` if none is."""
    installed = {name: found for name in LOWEST if (found := version_of(name))}
    old = [name for name in installed if _numbers(installed[name]) < _numbers(LOWEST[name])]
    needed, found = (" and ".join(f"{n} {of[n]}" for n in old) for of in (LOWEST, installed))
    command = " ".join(f'"{name}>={LOWEST[name]}"' for name in old)
    sentence = f"ddpnb needs {needed} or newer, but this Python has {found}."
    return f"{sentence} Run %pip install {command}, then restart the kernel." if old else ""


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]
