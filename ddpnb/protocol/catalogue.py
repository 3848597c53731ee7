"""The tables of all strategies and tasks.  Used in every process.

To add a strategy, write a file in ``rank/strategies/`` and add an entry to ``STRATEGIES`` below.
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
"""The name of the strategy to which every speed-up of a comparison is relative."""

CEILING = "no-comm"
"""The strategy without communication: an upper bound for strategies that share the work evenly."""

CELL_TASK = "cell"
"""The task whose model, data, loss and optimizer are defined by the notebook's cell."""

Dashes = Literal["solid", "dashed", "dash-dot", "long", "dotted", "dash-dot-dot", "long-short"]


class Style(NamedTuple):
    """The colour, dashes and marker of a strategy.  No two strategies share both dashes and marker.

    Ten colours are matplotlib's ``petroff10`` (Petroff, arXiv:2107.02270).  People with any colour
    vision can distinguish these colours.  Related strategies share a hue and differ in lightness.
    """

    colour: str
    dashes: Dashes
    marker: str
    """The marker in matplotlib's notation."""
    is_hollow: bool = False
    """True if only the marker's outline is drawn, to show a variant of another strategy."""


_NOT_DRAWN = Style("", "solid", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The facts about a strategy or task that ddpnb knows without importing its code."""

    about: str
    """A description in one line, which users see in lists."""
    import_path: str
    """The path of a strategy's class or of a task's function: ``"package.module:Name"``."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """The options by name.  Each option is a keyword argument of the class or function."""
    look: Style = _NOT_DRAWN
    aliases: tuple[str, ...] = ()
    """Names of the strategy in other libraries.  For these names, errors suggest ddpnb's name."""
    needs_shared_memory: bool = False
    """True if the strategy's ranks share memory, so that the strategy cannot run over a link."""
    across_hosts: str = ""
    """The strategy to use instead on several hosts; empty if this strategy runs across hosts."""

    def load(self) -> Any:
        """Import the class or function.  Call this only on ranks, because it imports torch."""
        module, _, name = self.import_path.partition(":")
        return getattr(importlib.import_module(module), name)

    @property
    def file(self) -> Path:
        """The source file of the class or function, found without an import."""
        module = self.import_path.partition(":")[0].removeprefix("ddpnb.")
        return PACKAGE / f"{module.replace('.', '/')}.py"


_TIMEOUT = Option(
    default=60.0,
    least=1,
    about="seconds until silent workers count as dead, if no worker takes a step",
)

_MOMENTUM = Option(
    default=None,
    kind=float,
    least=0,
    below=1,
    about="momentum of the default optimizer; replaces --momentum for this strategy",
)

COMPENSATION = 0.04
"""The lambda of DC-ASGD for ``compensate=on``.  The DC-ASGD paper uses this value for CIFAR-10."""


def _compensation(name: str, text: str) -> float:
    """Parse ``on``, ``off`` or a number."""
    try:
        return {"on": COMPENSATION, "off": 0.0}[text] if text in ("on", "off") else float(text)
    except ValueError:
        raise UserError(f"{name} must be on, off or a number, not {text!r}.") from None


STRATEGIES: Mapping[str, Entry] = {
    "single": Entry(
        about="training on one device: the baseline of every speed-up",
        import_path="ddpnb.rank.strategies.single:Single",
        look=Style("#717581", "solid", "s"),
        aliases=("OneDeviceStrategy",),
        options={
            "threads": Option(
                default="rank",
                about="use the CPU threads of one rank, or the threads of all ranks together",
                choices=("rank", "all"),
            )
        },
    ),
    "dp": Entry(
        about="torch's DataParallel; with fewer than two GPUs, CPU threads emulate it",
        import_path="ddpnb.rank.strategies.data_parallel:DataParallel",
        look=Style("#e76300", "dashed", "^"),
        aliases=("DataParallel",),
        across_hosts="ddp",
    ),
    "ddp": Entry(
        about="torch's DistributedDataParallel",
        import_path="ddpnb.rank.strategies.ddp:Ddp",
        look=Style("#3f90da", "solid", "o"),
        aliases=("DistributedDataParallel", "MirroredStrategy", "MultiWorkerMirroredStrategy"),
        options={
            "bucket_cap_mb": Option(default=25.0, about="MB at which DDP closes a bucket", above=0),
            "find_unused_parameters": Option(
                default=False, about="allow steps that do not use all parameters"
            ),
            "hook": Option(
                default="none",
                about="compression of the gradients that DDP sends",
                choices=("none", "fp16", "bf16"),
            ),
        },
    ),
    "ddp-by-hand": Entry(
        about="ddp written by hand: one all-reduce of all gradients, then the update",
        import_path="ddpnb.rank.strategies.ddp_by_hand:DdpByHand",
        look=Style("#93c4f2", "dash-dot", "8"),
    ),
    "ddp-overlap-by-hand": Entry(
        about="like ddp-by-hand, but sends gradients during the backward pass",
        import_path="ddpnb.rank.strategies.ddp_overlap_by_hand:DdpOverlapByHand",
        look=Style("#2f4be0", "long-short", "$\\spadesuit$"),
        options={
            "bucket_mb": Option(
                default=0.0, about="size of a message in MB; 0 sends gradients one by one", least=0
            )
        },
    ),
    "ring-by-hand": Entry(
        about="like ddp-by-hand, but with a ring all-reduce made of sends and receives",
        import_path="ddpnb.rank.strategies.ring_by_hand:RingByHand",
        look=Style("#a96b59", "long", "X"),
    ),
    "central": Entry(
        about="rank 0 keeps the master copy of the parameters in CPU memory and updates it",
        import_path="ddpnb.rank.strategies.central:Central",
        look=Style("#b9ac70", "dash-dot-dot", "P"),
        aliases=("CentralStorageStrategy",),
        across_hosts="ddp",
    ),
    "async": Entry(
        about="a parameter server; workers do not wait for each other",
        import_path="ddpnb.rank.strategies.async_ps:AsyncParameterServer",
        look=Style("#832db6", "dash-dot", "D"),
        aliases=("ParameterServerStrategy",),
        options={
            "bound": Option(
                default=-1,
                least=-1,
                about="maximum lead of a worker, in steps; 0 means synchronous, -1 means no limit",
            ),
            "compensate": Option(
                default=0.0,
                least=0,
                from_text=_compensation,
                about=f"lambda of DC-ASGD's delay compensation; 'on' means {COMPENSATION:g}",
            ),
            "momentum": _MOMENTUM,
            "timeout": _TIMEOUT,
        },
    ),
    "hogwild": Entry(
        about="workers update parameters in shared memory without locks; runs only on CPU ranks",
        import_path="ddpnb.rank.strategies.hogwild:Hogwild",
        look=Style("#c58ae8", "dotted", "d"),
        needs_shared_memory=True,
        across_hosts="async",
        options={"momentum": _MOMENTUM, "timeout": _TIMEOUT},
    ),
    "local-sgd": Entry(
        about="each rank trains its own model; every few steps, ranks average the weights",
        import_path="ddpnb.rank.strategies.local_sgd:LocalSgd",
        look=Style("#bd1f01", "solid", "v"),
        options={"every": Option(default=8, about="number of steps between two averages", least=1)},
    ),
    "diloco": Entry(
        about="like local-sgd, but a Nesterov step applies the averaged change of the weights",
        import_path="ddpnb.rank.strategies.diloco:DiLoCo",
        look=Style("#f0857a", "dashed", "<"),
        options={
            "every": Option(
                default=8, about="number of local steps between two outer steps", least=1
            ),
            "outer_lr": Option(default=0.5, about="learning rate of the Nesterov step", above=0),
            "outer_momentum": Option(
                default=0.5, about="momentum of the Nesterov step", least=0, most=0.99
            ),
        },
    ),
    "zero": Entry(
        about="torch's ZeroRedundancyOptimizer: each rank keeps a part of the optimizer state",
        import_path="ddpnb.rank.strategies.zero:Zero",
        look=Style("#ffa90e", "solid", "p"),
    ),
    "fsdp": Entry(
        about="torch's FSDP2: each rank keeps a part of parameters, gradients and optimizer state",
        import_path="ddpnb.rank.strategies.fsdp:Fsdp",
        look=Style("#b57a00", "long-short", "H"),
        options={
            "reshard": Option(
                default=True, about="free a layer's parameters after its forward pass"
            )
        },
    ),
    "gossip": Entry(
        about="in each step, a rank and its left or right neighbour average their weights",
        import_path="ddpnb.rank.strategies.gossip:Gossip",
        look=Style("#92dadd", "long", ">"),
    ),
    "no-comm": Entry(
        about="each rank trains on an equal share without communication: the ceiling (upper bound)",
        import_path="ddpnb.rank.strategies.no_comm:NoComm",
        look=Style("#6db38a", "dotted", "*"),
    ),
}
"""All strategies by name, in the order in which users see them."""

TASKS: Mapping[str, Entry] = {
    "digits": Entry(
        about="real data: scikit-learn's 1797 handwritten digits of 8x8 pixels",
        import_path="ddpnb.rank.tasks.digits:build",
    ),
    "text": Entry(
        about="real data: a small transformer predicts the next character of Python code",
        import_path="ddpnb.rank.tasks.text:build",
    ),
    "synthetic": Entry(
        about="synthetic data: images of CIFAR's shape, generated from a seed",
        import_path="ddpnb.rank.tasks.synthetic:build",
        options={
            "samples": Option(default=4096, least=16, about="number of training images"),
            "parameters": Option(
                default=0,
                least=0,
                about="number of parameters of the model after padding; 0 means no padding",
            ),
            "compute": Option(
                default=0, least=0, about="number of extra convolutions that lengthen each step"
            ),
        },
    ),
}
"""Built-in tasks by name."""
