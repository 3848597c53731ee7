"""The training options, which are the same for every strategy.  Used in every process.

Each option is declared once, as a field of ``TrainingSpec`` with an ``Option``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ddpnb.protocol.catalogue import CELL_TASK, TASKS
from ddpnb.protocol.devices import CARDS, MEASURED, MODELS, Devices, parse_devices
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import (
    LINKS,
    parse_kills,
    parse_link,
    parse_share,
    parse_slow,
    parse_task,
)
from ddpnb.protocol.options import check_options, option, options_of, read_options

_training, _steps, _devices, _data, _faults = (
    partial(option, group=group)
    for group in ("training", "steps", "emulated devices", "data", "faults on purpose")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """The training options, which are the same for every strategy of a comparison."""

    task: str = _training(
        CELL_TASK,
        f"task, such as {' | '.join(TASKS)} | synthetic:samples=512; by default the cell's task",
        example="TASK",
    )
    source: str = ""
    """The cell's code.  It defines ``model()`` and ``data(split)`` if ``task`` is ``"cell"``."""
    cell: int = 0
    """The ``n`` of the cell's ``In [n]``; 0 if there is no cell."""
    num_epochs: float = _training(
        2.0,
        "number of passes over the training data, counted over the samples of all workers",
        flag="--epochs",
        above=0,
    )
    batch_size: int = _training(256, "size of the global batch (all samples of a step)", least=1)
    learning_rate: float = _training(
        0.05,
        "learning rate of the default optimizer (SGD); if you give several, such as 0.02,0.05,0.1, "
        "each strategy is compared at the rate that gives its lowest held-out loss",
        flag="--lr",
        above=0,
        most_values=6,
    )
    rates: tuple[float, ...] = ()
    """The learning rates that every strategy tries; empty if there is only ``learning_rate``."""
    momentum: float = _training(0.0, "momentum of the default optimizer", least=0, below=1)
    seed: int = _training(
        0, "seed of the initial weights and of the order of samples", least=0, most=2**63 - 1
    )
    eval_every: float | None = _training(
        None,
        "number of epochs between evaluations on held-out samples; by default a tenth of the run; "
        "0 evaluates only at the end",
        least=0,
    )
    eval_samples: int | None = _training(
        None,
        "maximum number of samples per split in an evaluation; by default 10,000, or fewer if "
        "evaluations would take more than a quarter of the training time",
        least=1,
    )
    min_seconds: float | None = _training(
        None,
        "minimum training time of each run, in seconds; if needed, all runs train more epochs",
        above=0,
        most=86_400,
        example="S",
    )
    accumulate: int = _steps(
        1, "number of micro-batches per step of a worker (gradient accumulation)", least=1
    )
    amp: str = _steps(
        "none",
        "data type of the forward pass in mixed precision (torch.autocast)",
        choices=("none", "bf16"),  # bfloat16 needs no loss scaling
        example="TYPE",
    )
    clip: float | None = _steps(
        None, "maximum norm of all gradients together; ddpnb scales larger gradients down", above=0
    )
    batch_per_worker: int | None = _steps(
        None, "number of samples per step and worker; replaces --batch-size (weak scaling)", least=1
    )
    devices: str = _devices(
        "",
        "devices to emulate (times are computed, gradients are real): 8xV100, or 16xV100/2 on two "
        "hosts, or 8 devices that are each as fast as an idle core; real: no emulation",
        example="8xV100",
        offers=tuple(f"8x{card}" for card in CARDS),
    )
    as_: str = _devices(
        "",
        f"use the published time and bytes of this model on the cards: {' | '.join(MODELS)}",
        example="MODEL",
        offers=tuple(MODELS),
    )
    compute: str = _devices(
        "",
        "time that a device needs per sample, plus a fixed time per forward and backward pass",
        example="0.4ms/sample,2ms",
    )
    device_link: str = _devices(
        "", "link between emulated devices of a host", example="12GB/s,10us", offers=tuple(LINKS)
    )
    link: str = _devices(
        "",
        "rate and one-way latency of the emulated link between hosts (with one host, between its "
        f"devices), or the name of a link: {', '.join(LINKS)}",
        example="1Gbit,0.5ms",
        offers=tuple(LINKS),
    )
    num_data_workers: int = _data(
        0,
        "number of worker processes of each rank's DataLoader",
        flag="--data-workers",
        least=0,
        most=256,
    )
    save: bool = _data(
        False, "save the trained weights of each run to a file in data/runs/models (torch.save)"
    )
    slow: tuple[str, ...] = _faults(
        (),
        "slow down rank 1 by a factor of 3; 1:50ms adds 50 ms per step; 0:2x,1:3x slows two ranks",
        most_values=64,
        example="1:3x",
    )
    jitter: float = _faults(
        0.0,
        "maximum share of a step's time that ddpnb adds at random to each step of each rank",
        example="20%",
        from_text=parse_share,
        least=0,
        most=100,
    )
    kill: tuple[str, ...] = _faults(
        (), "kill rank 1 after 5 seconds of training", most_values=64, example="1@5s"
    )

    def __post_init__(self) -> None:
        check_options(self)
        parse_task(self.task)
        if self.task == CELL_TASK and not self.source.strip():
            raise UserError(
                "There is nothing to train. Define model() and data(split) in the cell, "
                f"or name a task with --task ({', '.join(TASKS)})."
            )
        parse_slow(self.slow)
        parse_kills(self.kill)
        if self.emulated is not None and self.min_seconds:  # the devices are parsed
            raise UserError(
                "--min-seconds needs measured times, but the times of emulated devices are "
                "computed. Remove --min-seconds, and set the length of the training with --epochs."
            )
        if self.link and self.devices == MEASURED:
            raise UserError("--link needs emulated devices. Remove --devices real.")
        if self.link:
            parse_link(self.link)

    @property
    def is_emulated(self) -> bool:
        """True if devices are emulated; unlike ``emulated``, this also works for a stored spec."""
        return self.devices not in ("", MEASURED)

    @property
    def emulated(self) -> Devices | None:
        """The emulated devices; None if the times are measured."""
        if not self.is_emulated:
            return None
        return parse_devices(
            self.devices,
            model=self.as_,
            compute=self.compute,
            device_link=self.device_link,
            link=self.link,
        )

    def global_batch(self, num_workers: int) -> int:
        """Return the number of samples per step of all workers together."""
        if self.batch_per_worker is None:
            return self.batch_size
        return self.batch_per_worker * num_workers

    @property
    def rate_words(self) -> str:
        """The learning rates in the user's notation: ``"0.05"``, ``"0.02,0.05"``."""
        return ",".join(f"{rate:.12g}" for rate in self.rates or (self.learning_rate,))

    @property
    def batch_words(self) -> str:
        """The global batch in words for users: ``"256"``, ``"64 per worker"``."""
        if self.batch_per_worker is None:
            return f"{self.batch_size:,}"
        return f"{self.batch_per_worker:,} per worker"


def make_training_spec(choices: Mapping[str, Any], **others: Any) -> TrainingSpec:
    """Return the spec of the training that the user's choices describe; see ``read_options``.

    ``others`` are fields that are not options.
    """
    if all(choices.get(name) is not None for name in ("batch_size", "batch_per_worker")):
        raise UserError(
            "--batch-size fixes the global batch, but with --batch-per-worker the global batch "
            "grows with the number of workers. Remove one of the two options."
        )
    fields = read_options(TrainingSpec, choices)
    if rates := fields.pop("learning_rate", ()):
        rates = options_of(TrainingSpec)["learning_rate"].validate("--lr", rates)
        fields |= {"learning_rate": rates[0], "rates": rates if len(rates) > 1 else ()}
    return TrainingSpec(**fields, **others)
