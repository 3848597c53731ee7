"""Which strategies and tasks are there, and what can be chosen about each?  (Both sides.)

A choice is written as one word: ``ddp``, or with options ``ddp:hook=fp16,bucket_cap_mb=5``.
The constructor of a strategy, and the builder of a task, take these options by name.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ddpnb.protocol.errors import UserError, advice, one_of
from ddpnb.protocol.options import Option, Value

Dashes = Literal["solid", "dashed", "dash-dot", "long", "dotted", "dash-dot-dot", "long-short"]

BASELINE = "single"
"""Speed-up is measured against this strategy, run in the same comparison."""

CEILING = "no-comm"
"""Even shares without any communication: none that shares evenly can be expected to be faster."""

CELL_TASK = "cell"
"""The task whose model, data, loss and optimizer the notebook's cell defines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One strategy or task: what it is, in a line, and what can be chosen about it."""

    about: str
    import_path: str
    """What makes it: a module and a name in it, ``"ddpnb.rank.strategies.ddp:Ddp"``."""
    options: Mapping[str, Option] = field(default_factory=dict)

    def load(self) -> Any:
        """Import what makes it; on the ranks alone, for it imports torch."""
        module, _, name = self.import_path.partition(":")
        return getattr(importlib.import_module(module), name)


class Look(NamedTuple):
    """How a strategy is drawn; dashes and marker together name it without any colour.

    Ten colours are matplotlib's ``petroff10`` (M. Petroff, arXiv:2107.02270), which any colour
    vision tells apart.  A family of strategies shares a hue, in clearly different lightness.
    """

    colour: str
    dashes: Dashes
    marker: str
    """As matplotlib spells it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyEntry(Entry):
    """All that is known of a strategy outside its own file."""

    look: Look
    aliases: tuple[str, ...] = ()
    """What other libraries call it: whoever writes that is shown the name here."""
    is_asynchronous: bool = False
    """Whether its updates have a staleness."""
    is_dense: bool = False
    """Whether it moves gradients as plain memory, and cannot train with sparse ones."""
    may_be_emulated: bool = False
    """Whether its plan says that it is emulated on some machines."""
    transports: tuple[str, ...] = ()
    """Those of ``training.TRANSPORTS`` that it can train by; empty: it has none to choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What one word stands for."""

    name: str
    options: Mapping[str, Value] = field(default_factory=dict)
    """Those that were given."""


_TIMEOUT = Option(
    default=60.0,
    least=1,
    about="seconds without a step of any worker after which silent workers count as dead",
)

STRATEGIES: Mapping[str, StrategyEntry] = {
    "single": StrategyEntry(
        about="one device",
        import_path="ddpnb.rank.strategies.single:Single",
        look=Look("#717581", "solid", "s"),
        aliases=("OneDeviceStrategy",),
    ),
    "dp": StrategyEntry(
        about="torch DataParallel; emulated by CPU threads without two GPUs",
        import_path="ddpnb.rank.strategies.data_parallel:DataParallel",
        look=Look("#e76300", "dashed", "^"),
        aliases=("DataParallel",),
        may_be_emulated=True,
    ),
    "ddp": StrategyEntry(
        about="torch DistributedDataParallel",
        import_path="ddpnb.rank.strategies.ddp:Ddp",
        look=Look("#3f90da", "solid", "o"),
        aliases=(
            "DistributedDataParallel",
            "MirroredStrategy",
            "MultiWorkerMirroredStrategy",
        ),
        options={
            "bucket_cap_mb": Option(
                default=25.0,
                about="MB of gradients per message",
                least=0,
                is_least_allowed=False,
            ),
            "static_graph": Option(default=False, about="every step uses the same parameters"),
            "hook": Option(
                default="none",
                about="compression of the gradients that are sent",
                choices=("none", "fp16", "bf16", "powersgd"),
            ),
            "powersgd_rank": Option(default=1, about="rank of PowerSGD's matrices", least=1),
        },
    ),
    "ddp-shm": StrategyEntry(
        about="the same, with an all-reduce in shared memory; CPU ranks only",
        import_path="ddpnb.rank.strategies.ddp_shm:DdpShm",
        look=Look("#174f86", "dashed", "h"),
        is_dense=True,
    ),
    "ddp-by-hand": StrategyEntry(
        about="flatten the gradients, all-reduce, step",
        import_path="ddpnb.rank.strategies.ddp_by_hand:DdpByHand",
        look=Look("#93c4f2", "dash-dot", "8"),
        is_dense=True,
    ),
    "ring-by-hand": StrategyEntry(
        about="the same, with a ring all-reduce from sends and receives",
        import_path="ddpnb.rank.strategies.ring_by_hand:RingByHand",
        look=Look("#a96b59", "long", "X"),
        is_dense=True,
    ),
    "central": StrategyEntry(
        about="one copy of the parameters on the host, updated there",
        import_path="ddpnb.rank.strategies.central:Central",
        look=Look("#b9ac70", "dash-dot-dot", "P"),
        aliases=("CentralStorageStrategy",),
        is_dense=True,
    ),
    "async": StrategyEntry(
        about="one parameter server, workers never wait for each other",
        import_path="ddpnb.rank.strategies.async_ps:AsyncParameterServer",
        look=Look("#832db6", "dash-dot", "D"),
        aliases=("ParameterServerStrategy",),
        is_asynchronous=True,
        is_dense=True,
        transports=("auto", "shm", "gloo", "rpc"),
        options={
            "period": Option(default=1, least=1, about="gradients per update, from any workers"),
            "bound": Option(
                default=-1,
                least=-1,
                about="steps a worker may be ahead of the slowest; 0: synchronous, -1: unlimited",
            ),
            "damping": Option(
                default=False, about="divide the learning rate by 1 + staleness (on, off)"
            ),
            "timeout": _TIMEOUT,
        },
    ),
    "hogwild": StrategyEntry(
        about="lock-free updates of parameters in shared memory; CPU ranks only",
        import_path="ddpnb.rank.strategies.hogwild:Hogwild",
        look=Look("#c58ae8", "dotted", "d"),
        is_asynchronous=True,
        transports=("auto", "shm"),
        options={"timeout": _TIMEOUT},
    ),
    "local-sgd": StrategyEntry(
        about="each rank trains alone; weights are averaged every few steps",
        import_path="ddpnb.rank.strategies.local_sgd:LocalSgd",
        look=Look("#bd1f01", "solid", "v"),
        options={
            "every": Option(default=8, about="steps between averages", least=1),
            "after": Option(default=0, about="steps of synchronous SGD at first", least=0),
        },
    ),
    "diloco": StrategyEntry(
        about="each rank trains alone; every few steps a Nesterov step on the averaged change",
        import_path="ddpnb.rank.strategies.diloco:DiLoCo",
        look=Look("#f0857a", "dashed", "<"),
        options={
            "every": Option(default=8, about="inner steps per outer step", least=1),
            "outer_lr": Option(
                default=0.7, about="the outer learning rate", least=0, is_least_allowed=False
            ),
            "outer_momentum": Option(default=0.9, about="the outer Nesterov momentum", least=0),
        },
    ),
    "zero": StrategyEntry(
        about="torch ZeroRedundancyOptimizer: each rank keeps a part of its state",
        import_path="ddpnb.rank.strategies.zero:Zero",
        look=Look("#ffa90e", "solid", "p"),
    ),
    "fsdp": StrategyEntry(
        about="torch FSDP2: each rank keeps a part of parameters, gradients and state",
        import_path="ddpnb.rank.strategies.fsdp:Fsdp",
        look=Look("#b57a00", "long-short", "H"),
        is_dense=True,
        options={"reshard": Option(default=True, about="free a layer after its forward pass")},
    ),
    "gossip": StrategyEntry(
        about="each rank averages its weights with a random neighbour, without waiting",
        import_path="ddpnb.rank.strategies.gossip:Gossip",
        look=Look("#92dadd", "long", ">"),
        is_asynchronous=True,
        options={
            "together": Option(
                default=False, about="meet in pairs, step by step (on, off); on GPUs always on"
            ),
            "timeout": _TIMEOUT,
        },
    ),
    "no-comm": StrategyEntry(
        about="each rank trains alone: the speed limit of these ranks",
        import_path="ddpnb.rank.strategies.no_comm:NoComm",
        look=Look("#6db38a", "dotted", "*"),
    ),
}
"""Strategies by name, in the order shown to users.  To add one is a file and an entry here."""

TASKS: Mapping[str, Entry] = {
    "digits": Entry(
        about="scikit-learn's 1797 handwritten digits, 8x8 pixels: real data",
        import_path="ddpnb.rank.tasks.digits:build",
    ),
    "cifar10": Entry(
        about="ResNet-18 on data/cifar-10-batches-bin; on synthetic images without it",
        import_path="ddpnb.rank.tasks.cifar10:build",
    ),
    "text": Entry(
        about="a small transformer learns Python's own sources, by character: real data",
        import_path="ddpnb.rank.tasks.text:build",
    ),
    "synthetic": Entry(
        about="CIFAR-shaped images made from a seed: synthetic data",
        import_path="ddpnb.rank.tasks.synthetic:build",
        options={
            "samples": Option(default=4096, least=16, about="images to train on"),
            "parameters": Option(
                default=0, least=0, about="parameters of the model, to exchange more; 0: as it is"
            ),
            "compute": Option(
                default=0, least=0, about="additional convolutions per image, to compute more"
            ),
        },
    ),
}
"""Built-in tasks by name."""


def strategy(word: str) -> Choice:
    """Return the strategy that a word names.

    A name that begins with a capital letter is a class of the user's own; whether there is
    one, and which options it takes, is known on the ranks alone.

    Raises:
        UserError: there is no such strategy or option, or a value does not fit.
    """
    if word[:1].isupper() and word.split(":")[0].isidentifier():
        name, given = _split(word)
        return Choice(name=name, options={key: _guess(value) for key, value in given.items()})
    return _choice("strategy", word, STRATEGIES)


def check_transport(word: str, transport: str) -> None:
    """Refuse a strategy that cannot exchange tensors in the way that was chosen.

    Args:
        word: the strategy, as ``strategy`` reads it.
        transport: one of ``training.TRANSPORTS``.

    Raises:
        UserError: it cannot.
    """
    name = strategy(word).name
    allowed = STRATEGIES[name].transports if name in STRATEGIES else ()
    if allowed and transport not in allowed:
        raise UserError(
            f"{name} trains in shared memory, not by {transport}: "
            f"leave --transport out, or {name} out of the comparison."
        )


def has_transport(word: str) -> bool:
    """Return whether a strategy heeds ``--transport``; one of the user's own may."""
    name = strategy(word).name
    return name not in STRATEGIES or bool(STRATEGIES[name].transports)


def task(word: str) -> Choice:
    """Return the task that a word names.

    Raises:
        UserError: there is no such task or option, or a value does not fit.
    """
    return Choice(name=CELL_TASK) if word == CELL_TASK else _choice("task", word, TASKS)


def _choice(kind: str, word: str, entries: Mapping[str, Entry]) -> Choice:
    name, given = _split(word)
    if name not in entries:
        raise one_of(kind, name, entries)
    options = entries[name].options
    for key in given:
        if not options:
            raise UserError(f"{name} has no options, but was given {key}.")
        if key not in options:
            raise UserError(f"{name} has no option {key!r}; {advice(key, options)}")
    return Choice(
        name=name,
        options={key: options[key].read(f"{name}:{key}", text) for key, text in given.items()},
    )


def _split(word: str) -> tuple[str, dict[str, str]]:
    name, colon, rest = word.partition(":")
    pairs = [part.partition("=") for part in rest.split(",")] if colon else []
    if any(not key or not equals for key, equals, _ in pairs):
        raise UserError(f"Write options as {name}:option=value,option=value, not {word}.")
    given = {key: value for key, _, value in pairs}
    if len(given) < len(pairs):
        raise UserError(f"{word} gives an option twice: leave one of them out.")
    return name, given


def _guess(text: str) -> Value:
    """Return the value of an option whose type is known on the ranks alone."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"on": True, "off": False}.get(text, text)
