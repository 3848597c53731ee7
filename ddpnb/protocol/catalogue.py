"""All strategies and tasks: the two tables at the end of this file.  (Every process.)

To add a strategy, write its file in ``rank/strategies/`` and its entry in ``STRATEGIES``.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.options import Option

PACKAGE = Path(__file__).parents[1]

BASELINE = "single"
"""The strategy against which the others' speed-up is measured, in the same comparison."""

CEILING = "no-comm"
"""The strategy without communication: no other that shares evenly can be expected to be faster."""

CELL_TASK = "cell"
"""The task of which the notebook's cell defines model, data, loss and optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is known of a strategy or task without importing it."""

    about: str
    """A line for the lists that users read."""
    import_path: str
    """The class of a strategy, or the function that builds a task: ``"package.module:Name"``."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Its keyword arguments, as users write them: ``ddp:hook=fp16``."""

    def load(self) -> Any:
        """Import the class or function; on the ranks alone, for it imports torch."""
        module, _, name = self.import_path.partition(":")
        return getattr(importlib.import_module(module), name)

    @property
    def file(self) -> Path:
        """The file of the class or function, which is not imported."""
        module = self.import_path.partition(":")[0].removeprefix("ddpnb.")
        return PACKAGE / f"{module.replace('.', '/')}.py"


Dashes = Literal["solid", "dashed", "dash-dot", "long", "dotted", "dash-dot-dot", "long-short"]


class Style(NamedTuple):
    """How a strategy is drawn; dashes and marker together identify it without any colour.

    Ten colours are matplotlib's ``petroff10`` (M. Petroff, arXiv:2107.02270), which any colour
    vision can distinguish.  Related strategies share a hue, in clearly different lightness.
    """

    colour: str
    dashes: Dashes
    marker: str
    """As matplotlib spells it."""
    is_hollow: bool = False
    """Whether the marker is an outline: it is, for a variant of a strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyEntry(Entry):
    """What is known of a strategy without importing it."""

    look: Style
    aliases: tuple[str, ...] = ()
    """Its names in other libraries; a user who writes one is referred to the name here."""
    needs_shared_memory: bool = False
    """Whether its ranks must share memory, so that no link can lie between them."""
    across_hosts: str = ""
    """What trains across hosts in its place; empty: it does itself."""


_TIMEOUT = Option(
    default=60.0,
    least=1,
    about="seconds without a step by any worker after which silent workers count as dead",
)

_MOMENTUM = Option(
    default=None,
    kind=float,
    least=0,
    below=1,
    about="momentum of the default optimizer, in place of --momentum",
)

COMPENSATION = 0.04
"""The lambda of DC-ASGD for ``compensate=on``: that of its paper for CIFAR-10."""


def _compensation(name: str, text: str) -> float:
    """Parse ``on``, ``off`` or a number."""
    try:
        return {"on": COMPENSATION, "off": 0.0}[text] if text in ("on", "off") else float(text)
    except ValueError:
        raise UserError(f"{name} takes on, off or a number, not {text!r}.") from None


STRATEGIES: Mapping[str, StrategyEntry] = {
    "single": StrategyEntry(
        about="one device",
        import_path="ddpnb.rank.strategies.single:Single",
        look=Style("#717581", "solid", "s"),
        aliases=("OneDeviceStrategy",),
        options={
            "threads": Option(
                default="rank",
                about="those of one rank, or of all ranks together",
                choices=("rank", "all"),
            )
        },
    ),
    "dp": StrategyEntry(
        about="torch DataParallel; emulated by CPU threads without two GPUs",
        import_path="ddpnb.rank.strategies.data_parallel:DataParallel",
        look=Style("#e76300", "dashed", "^"),
        aliases=("DataParallel",),
        across_hosts="ddp",
    ),
    "ddp": StrategyEntry(
        about="torch DistributedDataParallel",
        import_path="ddpnb.rank.strategies.ddp:Ddp",
        look=Style("#3f90da", "solid", "o"),
        aliases=("DistributedDataParallel", "MirroredStrategy", "MultiWorkerMirroredStrategy"),
        options={
            "bucket_cap_mb": Option(default=25.0, about="MB of gradients per message", above=0),
            "find_unused_parameters": Option(
                default=False, about="a step need not use all parameters"
            ),
            "hook": Option(
                default="none",
                about="compression of the gradients that are sent",
                choices=("none", "fp16", "bf16"),
            ),
        },
    ),
    "ddp-shm": StrategyEntry(
        about="the same, with an all-reduce in shared memory; CPU ranks only",
        import_path="ddpnb.rank.strategies.ddp_shm:DdpShm",
        look=Style("#174f86", "dashed", "h"),
        needs_shared_memory=True,
        across_hosts="ddp",
    ),
    "ddp-by-hand": StrategyEntry(
        about="flatten the gradients, all-reduce, step",
        import_path="ddpnb.rank.strategies.ddp_by_hand:DdpByHand",
        look=Style("#93c4f2", "dash-dot", "8"),
    ),
    "ddp-overlap-by-hand": StrategyEntry(
        about="the same, each gradient sent while the backward pass goes on",
        import_path="ddpnb.rank.strategies.ddp_overlap_by_hand:DdpOverlapByHand",
        look=Style("#2f4be0", "long-short", "$\\spadesuit$"),
        options={
            "bucket_mb": Option(
                default=0.0, about="MB of gradients per message; 0: one for each parameter", least=0
            )
        },
    ),
    "ring-by-hand": StrategyEntry(
        about="ddp-by-hand with a ring all-reduce from sends and receives",
        import_path="ddpnb.rank.strategies.ring_by_hand:RingByHand",
        look=Style("#a96b59", "long", "X"),
    ),
    "central": StrategyEntry(
        about="one copy of the parameters on the host, updated there",
        import_path="ddpnb.rank.strategies.central:Central",
        look=Style("#b9ac70", "dash-dot-dot", "P"),
        aliases=("CentralStorageStrategy",),
        across_hosts="ddp",
    ),
    "async": StrategyEntry(
        about="one parameter server, workers never wait for each other",
        import_path="ddpnb.rank.strategies.async_ps:AsyncParameterServer",
        look=Style("#832db6", "dash-dot", "D"),
        aliases=("ParameterServerStrategy",),
        options={
            "bound": Option(
                default=-1,
                least=-1,
                about="steps a worker may be ahead of the slowest; 0: synchronous, -1: unlimited",
            ),
            "compensate": Option(
                default=0.0,
                least=0,
                from_text=_compensation,
                about=f"delay compensation (DC-ASGD): its lambda; on: {COMPENSATION:g}",
            ),
            "momentum": _MOMENTUM,
            "timeout": _TIMEOUT,
        },
    ),
    "hogwild": StrategyEntry(
        about="lock-free updates of parameters in shared memory; CPU ranks only",
        import_path="ddpnb.rank.strategies.hogwild:Hogwild",
        look=Style("#c58ae8", "dotted", "d"),
        needs_shared_memory=True,
        across_hosts="async",
        options={"momentum": _MOMENTUM, "timeout": _TIMEOUT},
    ),
    "local-sgd": StrategyEntry(
        about="each rank trains alone; weights are averaged every few steps",
        import_path="ddpnb.rank.strategies.local_sgd:LocalSgd",
        look=Style("#bd1f01", "solid", "v"),
        options={"every": Option(default=8, about="steps from one average to the next", least=1)},
    ),
    "diloco": StrategyEntry(
        about="each rank trains alone; every few steps a Nesterov step on the averaged change",
        import_path="ddpnb.rank.strategies.diloco:DiLoCo",
        look=Style("#f0857a", "dashed", "<"),
        options={
            "every": Option(default=8, about="inner steps per outer step", least=1),
            "outer_lr": Option(default=0.5, about="the outer learning rate", above=0),
            "outer_momentum": Option(
                default=0.5, about="the outer Nesterov momentum", least=0, most=0.99
            ),
        },
    ),
    "zero": StrategyEntry(
        about="torch ZeroRedundancyOptimizer: each rank keeps a part of its state",
        import_path="ddpnb.rank.strategies.zero:Zero",
        look=Style("#ffa90e", "solid", "p"),
    ),
    "fsdp": StrategyEntry(
        about="torch FSDP2: each rank keeps a part of parameters, gradients and state",
        import_path="ddpnb.rank.strategies.fsdp:Fsdp",
        look=Style("#b57a00", "long-short", "H"),
        options={
            "reshard": Option(
                default=True, about="free a layer's parameters until its backward pass"
            )
        },
    ),
    "gossip": StrategyEntry(
        about="each rank averages its weights with one neighbour, another in each step",
        import_path="ddpnb.rank.strategies.gossip:Gossip",
        look=Style("#92dadd", "long", ">"),
    ),
    "no-comm": StrategyEntry(
        about="each rank alone on an even share: an upper bound of the speed here",
        import_path="ddpnb.rank.strategies.no_comm:NoComm",
        look=Style("#6db38a", "dotted", "*"),
    ),
}
"""Strategies by name, in the order in which users see them."""

TASKS: Mapping[str, Entry] = {
    "digits": Entry(
        about="scikit-learn's 1797 handwritten digits, 8x8 pixels: real data",
        import_path="ddpnb.rank.tasks.digits:build",
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
                default=0, least=0, about="of the whole model, for more to exchange; 0: as it is"
            ),
            "compute": Option(
                default=0, least=0, about="additional convolutions per image, for more to compute"
            ),
        },
    ),
}
"""Built-in tasks by name."""
