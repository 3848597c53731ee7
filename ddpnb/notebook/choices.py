"""How do the choices of a training become options of a magic, and back?  (Notebook side.)"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from IPython.core.magic_arguments import ArgDecorator

from ddpnb.catalogue import CELL_TASK, STRATEGIES, TASKS, Option
from ddpnb.errors import UserError
from ddpnb.training import GROUPS, Flag, TrainingSpec, flags


class training_arguments(ArgDecorator):  # noqa: N801  as IPython's own
    """Gives a magic an option for each choice of a training, under headings."""

    def add_to_parser(self, parser: argparse.ArgumentParser, group: object) -> None:
        """Add the options."""
        headings = {name: parser.add_argument_group(name) for name in GROUPS}
        for _, flag in flags():
            headings[flag.group].add_argument(flag.option, **_settings(flag))


def catalogue_text() -> str:
    """Return the strategies and tasks there are, with their options: the end of a help text."""
    lines: list[str] = []
    for heading, entries in (("strategies", STRATEGIES), ("tasks", TASKS)):
        lines += ["", f"{heading}:"]
        for name, entry in entries.items():
            lines.append(f"  {name:<17}  {entry.about}")
            for key, option in entry.options.items():
                lines.append(f"    {name}:{key}={_written(option)}  {option.about}")
    return "\n".join(lines[1:])


def _written(option: Option) -> str:
    """Return what an option may be: its choices, or what it is where nothing is chosen."""
    if isinstance(option.default, bool):
        return "on|off"
    return "|".join(option.choices) or str(option.default)


def training_of(chosen: Mapping[str, Any], **others: Any) -> TrainingSpec:
    """Return the training that was chosen.

    Args:
        chosen: by the names that the choices have in Python; more names do no harm.
        **others: fields that are no choices.

    Raises:
        UserError: something cannot be.
    """
    fields = {name: chosen[flag.keyword] for name, flag in flags() if flag.keyword in chosen}
    as_fields = {name: _as_field(flag, fields[name]) for name, flag in flags() if name in fields}
    return TrainingSpec(**as_fields, **others)


def _as_field(flag: Flag, value: Any) -> Any:
    if flag.kind is tuple:
        return tuple([value] if isinstance(value, str) else value)
    return _share(str(value)) if flag.keyword == "jitter" else value


def _settings(flag: Flag) -> dict[str, Any]:
    about = flag.about.replace("%", "%%")
    if flag.kind is bool:
        return {"action": "store_true", "help": about}
    if flag.default not in (None, (), "", CELL_TASK):
        about = f"{about} [{str(flag.default).removesuffix('.0')}]"
    choices = f"{' | '.join(flag.choices)}: " if flag.choices else ""
    settings = {"metavar": flag.example, "help": choices + about}
    settings |= {"dest": flag.keyword, "default": argparse.SUPPRESS}
    if flag.kind is tuple:
        return settings | {"action": _Extend}
    # A share may be written in percent: its text is read in training_of, as in Python.
    return settings | {"type": str if flag.keyword == "jitter" else flag.kind}


class _Extend(argparse.Action):
    """Collects what is given several times, or with commas."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, ())
        setattr(namespace, self.dest, (*before, *str(values).split(",")))


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UserError(f"--jitter is a share, 20% or 0.2, not {text}.") from None
    if share > 1 and not text.endswith("%"):
        told = f"write {share:g}% or {share / 100:g}"
        raise UserError(f"--jitter {text} would be {100 * share:g} %; {told}.")
    return share
