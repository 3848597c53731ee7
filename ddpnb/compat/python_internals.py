"""Private parts of Python's standard library.  (Kernel.)

``sys._getframe``, ``sys._current_frames`` and ``os._exit`` are documented, so not among them.
"""

import argparse

from ddpnb.compat.probe import missing, probe


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
    return missing((lists_options,))
