"""The options of a training, the same for every strategy.  (Every process.)

Each is declared once, as a field of ``TrainingSpec`` with its ``Option``.
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
from ddpnb.protocol.options import check_options, option, read_options

_training, _steps, _devices, _data, _faults = (
    partial(option, group=group)
    for group in ("training", "steps", "emulated devices", "data", "faults on purpose")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """The options of a training: the same for every strategy of a comparison."""

    task: str = _training(
        CELL_TASK,
        f"{' | '.join(TASKS)}, with options as in synthetic:samples=512; by default the cell's own",
        example="TASK",
    )
    source: str = ""
    """The comparison's cell; defines ``model()`` and ``data(split)`` if ``task`` is ``"cell"``."""
    cell: int = 0
    """The ``n`` of its ``In [n]``; 0 if there is none."""
    num_epochs: float = _training(
        2.0,
        "passes over the training data; for asynchronous runs counted in samples seen",
        flag="--epochs",
        above=0,
    )
    batch_size: int = _training(256, "the global batch: samples per step over all workers", least=1)
    learning_rate: float = _training(
        0.05,
        "learning rate of the default optimizer, SGD; of several, 0.02,0.05,0.1, each "
        "strategy is compared at its best by held-out loss",
        flag="--lr",
        above=0,
        most_values=6,
    )
    rates: tuple[float, ...] = ()
    """The learning rates that every strategy tries; empty: ``learning_rate`` alone."""
    momentum: float = _training(0.0, "momentum of the default optimizer", least=0, below=1)
    seed: int = _training(
        0, "seed of the initial weights and the order of samples", least=0, most=2**63 - 1
    )
    eval_every: float | None = _training(
        None,
        "epochs between evaluations on held-out samples, for the curve; by default a tenth "
        "of the run; 0: at the end alone",
        least=0,
    )
    eval_samples: int | None = _training(
        None,
        "samples of each split that a model is judged on; by default as many as take a "
        "quarter of the training time, 10,000 at most",
        least=1,
    )
    min_seconds: float | None = _training(
        None,
        "more epochs where a strategy would be trained for less, the same for all",
        above=0,
        most=86_400,
        example="S",
    )
    accumulate: int = _steps(
        1, "gradient accumulation: micro-batches per step of each worker", least=1
    )
    amp: str = _steps(
        "none",
        "mixed precision: type of the forward pass where that is safe",
        choices=("none", "bf16"),  # bfloat16 needs no scaling of the loss
        example="TYPE",
    )
    clip: float | None = _steps(
        None, "largest norm of all gradients together; larger gradients are scaled down", above=0
    )
    batch_per_worker: int | None = _steps(
        None, "weak scaling: samples per step of each worker, in place of --batch-size", least=1
    )
    devices: str = _devices(
        "",
        "time is computed for so many devices, each as fast as one idle core: 8; or for "
        "cards, on two hosts: 16xV100/2; gradients and losses are real; real: it is measured",
        example="8xV100",
        offers=tuple(f"8x{card}" for card in CARDS),
    )
    as_: str = _devices(
        "",
        f"with cards: time and bytes are those published for {' | '.join(MODELS)}",
        example="MODEL",
        offers=tuple(MODELS),
    )
    compute: str = _devices(
        "",
        "what a device takes for a sample, and for a forward and backward pass",
        example="0.4ms/sample,2ms",
    )
    device_link: str = _devices(
        "", "the link between devices of one host", example="12GB/s,10us", offers=tuple(LINKS)
    )
    link: str = _devices(
        "",
        "the network between hosts, rate and one-way latency, with one host between its "
        f"devices; or {', '.join(LINKS)}",
        example="1Gbit,0.5ms",
        offers=tuple(LINKS),
    )
    num_data_workers: int = _data(
        0,
        "processes per rank that load samples ahead (torch's DataLoader)",
        flag="--data-workers",
        least=0,
        most=256,
    )
    save: bool = _data(
        False, "rank 0 writes the trained weights to a file in data/runs/models (torch.save)"
    )
    slow: tuple[str, ...] = _faults(
        (),
        "rank 1 takes 3 times as long; 1:50ms: 50 ms longer per step; separate several by commas",
        most_values=64,
        example="1:3x",
    )
    jitter: float = _faults(
        0.0,
        "every step of every rank takes up to this share longer, at random",
        example="20%",
        from_text=parse_share,
        least=0,
        most=100,
    )
    kill: tuple[str, ...] = _faults(
        (), "rank 1 is killed after 5 seconds of training", most_values=64, example="1@5s"
    )

    def __post_init__(self) -> None:
        parse_task(self.task)
        if self.task == CELL_TASK and not self.source.strip():
            raise UserError(
                "Nothing to train: define model() and data(split) in the cell, "
                f"or name a task with --task ({', '.join(TASKS)})."
            )
        check_options(self)
        for text in self.slow:
            parse_slow(text)
        parse_kills(self.kill)
        if self.emulated is not None and self.min_seconds:  # the devices are parsed
            raise UserError(
                "--min-seconds is for measured times, and those of emulated devices are "
                "computed: leave it out, and say with --epochs how long to train."
            )
        if self.link and self.devices == MEASURED:
            raise UserError("--link is a network between emulated devices: leave --devices out.")
        if self.link:
            parse_link(self.link)

    @property
    def is_emulated(self) -> bool:
        """Whether devices are emulated; unlike ``emulated``, also of a spec that was stored."""
        return self.devices not in ("", MEASURED)

    @property
    def emulated(self) -> Devices | None:
        """The devices whose time is computed; None: the time is measured."""
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
        """Return the samples per step of so many workers together."""
        if self.batch_per_worker is None:
            return self.batch_size
        return self.batch_per_worker * num_workers

    @property
    def rate_words(self) -> str:
        """The learning rates as users write them: ``"0.05"``, ``"0.02,0.05"``."""
        return ",".join(f"{rate:.12g}" for rate in self.rates or (self.learning_rate,))

    @property
    def batch_words(self) -> str:
        """The global batch as users read it: ``"256"``, ``"64 per worker"``."""
        if self.batch_per_worker is None:
            return f"{self.batch_size:,}"
        return f"{self.batch_per_worker:,} per worker"


def make_training_spec(choices: Mapping[str, Any], **others: Any) -> TrainingSpec:
    """Return the training that the user chose; see ``read_options``.

    ``others`` are fields that are not options.
    """
    if all(choices.get(name) is not None for name in ("batch_size", "batch_per_worker")):
        raise UserError(
            "--batch-size fixes the global batch, and --batch-per-worker lets it grow with the "
            "workers: leave one of them out."
        )
    fields = read_options(TrainingSpec, choices)
    if rates := fields.pop("learning_rate", ()):
        fields |= {"learning_rate": rates[0], "rates": rates if len(rates) > 1 else ()}
    return TrainingSpec(**fields, **others)
