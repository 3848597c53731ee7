"""How do the choices of a training become options of a magic, and back?  (Notebook side.)"""

import argparse
import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, TypeVar

from IPython.core.magic_arguments import ArgDecorator

from ddpnb.catalogue import CELL_TASK, STRATEGIES, TASKS
from ddpnb.options import Option
from ddpnb.training import TrainingSpec, training_options

Function = TypeVar("Function", bound=Callable[..., Any])


class training_arguments(ArgDecorator):  # noqa: N801  as IPython's own
    """Gives a magic an option for each choice of a training, under headings."""

    def add_to_parser(self, parser: argparse.ArgumentParser, group: object) -> None:
        """Add the options."""
        headings: dict[str, Any] = {}
        for _, option in training_options():
            if option.group not in headings:
                headings[option.group] = parser.add_argument_group(option.group)
            headings[option.group].add_argument(option.flag, **_settings(option))


def catalogue_text() -> str:
    """Return the strategies and tasks there are, with their options: the end of a help text."""
    lines: list[str] = []
    for heading, entries in (("strategies", STRATEGIES), ("tasks", TASKS)):
        lines += ["", f"{heading}:"]
        for name, entry in entries.items():
            lines.append(f"  {name:<17}  {entry.about}")
            for key, option in entry.options.items():
                written = "|".join(option.values) or option.default
                lines.append(f"    {name}:{key}={written}  {option.about}")
    return "\n".join(lines[1:])


def training_of(
    chosen: Mapping[str, Any], *, in_python: bool = False, **others: Any
) -> TrainingSpec:
    """Return the training that was chosen.

    Args:
        chosen: texts or values, by the names that the options have in Python; more do no harm.
        in_python: whether errors name the options as in Python, or as in a magic's line.
        **others: fields that are no options.

    Raises:
        UserError: something cannot be.
    """
    fields = {
        name: option.read(option.keyword if in_python else option.flag, chosen[option.keyword])
        for name, option in training_options()
        if option.keyword in chosen
    }
    return TrainingSpec(**fields, **others)


def takes_training_options(function: Function) -> Function:
    """Give a function's signature and help each option in place of ``**choices``."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    options = [option for _, option in training_options()]
    chosen = [
        Parameter(option.keyword, Parameter.KEYWORD_ONLY, default=option.default)
        for option in options
    ]
    function.__signature__ = signature.replace(parameters=own + chosen)  # type: ignore[attr-defined]
    told = "\n".join(f"        {option.keyword}: {option.meaning}." for option in options)
    function.__doc__ = (function.__doc__ or "").replace("        **choices: as listed.", told)
    return function


def _settings(option: Option) -> dict[str, Any]:
    about = option.meaning.replace("%", "%%")
    if option.value_kind is bool:
        return {"action": "store_true", "help": about}
    if option.default not in (None, (), "", CELL_TASK):
        about = f"{about} [{str(option.default).removesuffix('.0')}]"
    settings = {"metavar": option.example, "help": about}
    if option.value_kind is tuple:
        settings["action"] = "append"
    return settings | {"dest": option.keyword, "default": argparse.SUPPRESS}
