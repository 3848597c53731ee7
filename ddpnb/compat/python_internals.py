"""Private parts of Python's standard library.  (Every process.)

``sys._getframe``, ``sys._current_frames`` and ``os._exit`` are documented, so not among them.
"""

import argparse
import asyncio
import contextlib
from collections.abc import Iterator

from ddpnb.compat.probe import missing, probe


@probe("Python", "a cell on the ranks cannot use await outside a function")
def leaves_loops() -> bool:
    """Whether another event loop can run inside a running one."""
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    asyncio._set_running_loop(running)
    return True


@contextlib.contextmanager
def outside_of_loop() -> Iterator[None]:
    """Return a context in which this thread has no running event loop, so that another can run."""
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)


@probe("Python", "options of magics are not completed, and a misspelt one gets no suggestion")
def lists_options() -> bool:
    """Whether the options of a parser can be listed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--given")
    return "--given" in _options(parser)


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of a parser; none if they cannot be listed."""
    return _options(parser) if lists_options.works else []


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def missing_features() -> tuple[str, ...]:
    """Return a sentence for each feature that is off with this version of Python."""
    return missing((leaves_loops, lists_options))
