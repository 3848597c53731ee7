"""What a run writes to its checkpoints and when, and what may be resumed from them (ranks).

    FOLDER/RUN/step-00000040/rank-0-of-2.pt    what rank 0 needs to go on after 40 steps
    FOLDER/RUN/model.pt                        the trained model, at the end

A file exists as a whole or not at all, and a checkpoint counts once all its parts exist.  So a kill
at any moment leaves the checkpoint before it.  If ranks drift apart, more checkpoints stay until
the slowest rank has written its parts.  Nothing is unpickled: files are read with ``weights_only``.
"""

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ddpnb.protocol.catalogue import CELL_TASK
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import MODEL_FILE, RunSpec
from ddpnb.protocol.processes import atomic_write
from ddpnb.rank.random_state import random_state, set_random_state
from ddpnb.rank.strategies.base import State, Strategy
from ddpnb.rank.strategies.replica import Replica
from ddpnb.rank.tasks.batches import Shard
from ddpnb.rank.training.context import RunContext
from ddpnb.rank.training.timing import Clock

NUM_KEPT = 2
"""Complete checkpoints of a run that are kept, besides all newer ones."""
NUM_OWN_FOLDERS = 3
"""Folders above a checkpoint's file that may be new: those of the step, the run and all runs."""
SAME = {
    "batch_size": "--batch-size",
    "seed": "--seed",
    "batch_per_worker": "--batch-per-worker",
    "learning_rate": "--lr",
    "momentum": "--momentum",
    "lr_scaling": "--lr-scaling",
    "num_lr_warmup_epochs": "--lr-warmup",
}
"""Settings that must be the same for samples and learning rate to continue; with their options."""


def resumed(context: RunContext) -> RunContext:
    """Return a run with the last complete checkpoint that it resumes from, if it does.

    Raises:
        UserError: there is none, it is from another training, or that is complete.
    """
    spec = context.spec
    if not spec.resume or context.state.rank >= context.plan.num_ranks:
        return context
    checkpoint = read_checkpoint(part_of(context, spec.resume), spec)
    context.schedule.check_unfinished(checkpoint["step"])
    return replace(context, first_step=checkpoint["step"], checkpoint=checkpoint)


def set_up(context: RunContext, strategy: Strategy, replica: Replica) -> None:
    """Set up a strategy, from the start or from a checkpoint."""
    checkpoint = context.checkpoint
    if checkpoint is None:
        strategy.setup(replica)
        return
    if "model" in checkpoint["strategy"]:
        replica.model.load_state_dict(checkpoint["strategy"]["model"])
    strategy.setup(replica)
    if context.rejoin_info is not None:  # by now the others have trained on from the checkpoint
        return
    strategy.load(replica, checkpoint["strategy"])
    if part_of(context, context.spec.resume).part == context.state.rank:
        set_random_state(checkpoint["random"], context.device)  # else they are another rank's


@final
@dataclass(slots=True, kw_only=True)
class CheckpointCallback:
    """Writes the checkpoints of a run, if any are wanted; in asynchronous runs rank 0 alone."""

    context: RunContext
    strategy: Strategy
    """Provides the state; it has been set up."""
    replica: Replica
    """What the strategy was set up with."""
    clock: Clock
    """Stands still while synchronous workers write."""
    barrier: Callable[[], None]
    """Returns when all ranks have called it; used if each step waits for all."""
    warn: Callable[[str], None]
    """Takes a few words the first time that the disk refuses."""
    checkpoints: "Checkpoints | None" = field(default=None, init=False)

    def __post_init__(self) -> None:
        context = self.context
        spec = context.spec
        is_writer = context.plan.synchronous or context.state.rank == 0
        if spec.save_every and spec.checkpoints and is_writer:
            self.checkpoints = Checkpoints(
                part_of(context, spec.run_id),
                every=max(1, round(spec.save_every * context.schedule.steps_per_epoch)),
                first_step=context.first_step,
                untimed=self.untimed,
                warn=self.warn,
            )

    def after(self, shard: Shard) -> None:
        """Write a checkpoint after the step on a shard, if one is due.

        Synchronous workers also write one after the last step; only ``Strategy.finish`` follows.
        """
        if self.checkpoints is not None:
            context, num_steps = self.context, self.context.first_step + shard.step + 1
            is_last = context.plan.synchronous and num_steps == context.schedule.num_steps
            self.checkpoints.after(num_steps, lambda: self._state(num_steps), is_last=is_last)

    def end(self) -> None:
        """Write the last checkpoint of an asynchronous run: rank 0 may have had no late shard."""
        if self.checkpoints is not None and not self.context.plan.synchronous:
            num_steps = self.context.schedule.num_steps
            self.checkpoints.after(num_steps, lambda: self._state(num_steps), is_last=True)

    def finish(self, model: nn.Module) -> None:
        """Write the trained model."""
        if self.checkpoints is not None:
            self.checkpoints.finish(model)

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Stop the clock of synchronous workers until the slowest has written.

        Asynchronous workers train on meanwhile, so rank 0's clock runs.
        """
        if not self.context.plan.synchronous:
            yield
            return
        with self.clock.paused():
            yield
            if self.context.plan.num_steps_ahead == 0:
                self.barrier()

    def _state(self, num_steps: int) -> State:
        return {
            "step": num_steps,
            "spec": description(self.context.spec, self.replica.optimizers),
            "strategy": self.strategy.save(self.replica),
            "random": random_state(self.context.device),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPart:
    """One rank's part of a run's checkpoints."""

    folder: Path
    """The run's own folder."""
    part: int
    num_parts: int

    def path(self, step: int) -> Path:
        """Return the file of this part after so many steps."""
        return self.folder / f"step-{step:08}" / self.name(self.part)

    def name(self, part: int) -> str:
        """Return the file name of any part."""
        return f"rank-{part}-of-{self.num_parts}.pt"


def part_of(context: RunContext, run_id: str) -> CheckpointPart:
    """Return this rank's part of a run's checkpoints; asynchronous runs have rank 0's part only."""
    plan = context.plan
    part, num_parts = (context.state.rank, plan.num_ranks) if plan.synchronous else (0, 1)
    folder = Path(context.spec.checkpoints) / run_id
    return CheckpointPart(folder=folder, part=part, num_parts=num_parts)


@final
class Checkpoints:
    """Writes one rank's part of a run's checkpoints.

    If the disk refuses, the training goes on and warns once.

    Args:
        part: this rank's.
        every: steps between checkpoints.
        first_step: steps of the run that was resumed.
        untimed: makes the context in which files are written.
        warn: takes a few words the first time that the disk refuses.
    """

    def __init__(
        self,
        part: CheckpointPart,
        *,
        every: int,
        first_step: int = 0,
        untimed: Callable[[], AbstractContextManager[None]] = nullcontext,
        warn: Callable[[str], None],
    ) -> None:
        self._part = part
        self._every = every
        self._untimed = untimed
        self._warn = warn
        self._num_made = first_step // every
        self._last = 0
        self._has_warned = False

    def after(self, num_steps: int, state: Callable[[], State], *, is_last: bool = False) -> None:
        """Write a checkpoint if one is due.

        Args:
            num_steps: global batches trained on so far.
            state: returns what to write.
            is_last: whether none will follow.
        """
        is_new = num_steps > self._last
        if num_steps // self._every <= self._num_made and not (is_last and is_new):
            return
        self._num_made = num_steps // self._every
        self._last = num_steps
        with self._untimed():
            if self._write(self._part.path(num_steps), state()):
                self._remove_old()

    def finish(self, model: nn.Module) -> None:
        """Write the trained model."""
        self._write(self._part.folder / MODEL_FILE, model.state_dict())

    def _write(self, path: Path, state: State) -> bool:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, state)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"no checkpoint: {error.strerror or error}")
            return False
        return True

    def _remove_old(self) -> None:
        """Remove all parts that are older than the newest complete checkpoints.

        No rank still writes an older part, so any rank may remove the parts of all.
        """
        complete = [folder for folder in _folders(self._part) if _is_complete(folder, self._part)]
        if len(complete) < NUM_KEPT:
            return
        for folder in _folders(self._part):
            if folder < complete[-NUM_KEPT]:
                with contextlib.suppress(OSError):  # another rank may be removing it too
                    for path in folder.iterdir():
                        path.unlink(missing_ok=True)
                    folder.rmdir()


def write(path: Path, state: State) -> None:
    """Write a file that exists as a whole or not at all, even after the machine has crashed.

    Raises:
        OSError: the disk refuses; nothing is left behind.
    """
    content = io.BytesIO()
    torch.save(state, content)
    atomic_write(path, content.getbuffer(), synced_folders=path.parents[:NUM_OWN_FOLDERS])


def read_checkpoint(part: CheckpointPart, spec: RunSpec) -> State:
    """Return this rank's part of the last complete checkpoint.

    Raises:
        UserError: there is none, or it is from another training.
    """
    path = part.path(last_step(part))
    try:
        state: State = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"The checkpoint {path} cannot be read ({type(error).__name__}): "
            "it is damaged, or not one of ddpnb's."
        ) from error
    check_spec(state["spec"], spec)
    return state


def last_step(part: CheckpointPart) -> int:
    """Return the number of steps after which the last complete checkpoint was made.

    Raises:
        UserError: there is none, or it has another number of parts.
    """
    for folder in reversed(_folders(part)):
        if _is_complete(folder, part):
            return int(folder.name.removeprefix("step-"))
    others = {path.stem.split("-")[-1] for path in part.folder.glob("step-*/rank-*-of-*.pt")}
    if others - {str(part.num_parts)}:
        raise UserError(
            f"The run to resume was trained by {others.pop()} ranks, not {part.num_parts}: "
            "start as many with %ddp_restart -n."
        )
    raise UserError(
        f"There is no complete checkpoint of the run to resume ({part.folder.name}): "
        "train it with --save-every first."
    )


def _folders(part: CheckpointPart) -> list[Path]:
    """Return the folders of all checkpoints of a run, the oldest first."""
    return sorted(part.folder.glob("step-*"))


def _is_complete(folder: Path, part: CheckpointPart) -> bool:
    return all((folder / part.name(number)).is_file() for number in range(part.num_parts))


def description(spec: RunSpec, optimizers: Sequence[Optimizer]) -> State:
    """Return the part of a checkpoint that is compared before a run is resumed."""
    return {
        "strategy": spec.strategy,
        "task": spec.task,
        "optimizers": [_kind(optimizer) for optimizer in optimizers],
    } | {name: getattr(spec, name) for name in SAME}


def check_spec(old: State, spec: RunSpec) -> None:
    """Refuse a checkpoint of another training; what an older one does not hold is not compared.

    Args:
        old: the ``description`` in the checkpoint.
        spec: the training that resumes from it.

    Raises:
        UserError: something is not the same.
    """
    if old["strategy"] != spec.strategy:
        raise UserError(
            f"The run to resume was trained with {old['strategy']}, not {spec.strategy}."
        )
    if old.get("task", spec.task) != spec.task:
        raise UserError(
            f"The run to resume was trained on {_task(old['task'])}, not on {_task(spec.task)}: "
            "train the same."
        )
    for name, option in SAME.items():
        value = getattr(spec, name)
        if old.get(name, value) != value:
            raise UserError(
                f"The run to resume was trained with {option} {_value(old[name])}, "
                f"not {_value(value)}: give the same."
            )


def check_replica(replica: Replica, checkpoint: State) -> None:
    """Refuse a checkpoint of another model or another optimizer.

    Args:
        replica: its optimizer has been made.
        checkpoint: the state to resume from.

    Raises:
        UserError: it does not fit.
    """
    old_model = checkpoint["strategy"].get("model", {})
    if old_model and _shapes(old_model) != _shapes(replica.model.state_dict()):
        raise UserError(
            "The checkpoint to resume from is of another model: let model() return the same one."
        )
    # A class of the user's own may make none here.
    kinds = zip(checkpoint["spec"].get("optimizers", [])[:1], replica.optimizers, strict=False)
    for old, mine in kinds:
        if old != (kind := _kind(mine)):
            raise UserError(
                f"The run to resume was trained with {_spelled(old)}, not {_spelled(kind)}: "
                "let optimizer(params) return the same."
            )


def _shapes(state: Mapping[str, Any]) -> dict[str, torch.Size | None]:
    return {name: getattr(value, "shape", None) for name, value in state.items()}


def _task(name: str) -> str:
    return "a cell's own model" if name == CELL_TASK else name


def _value(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _kind(optimizer: Optimizer) -> list[str | int]:
    """Return the class of an optimizer and its number of groups: these must fit its state."""
    return [type(optimizer).__name__, len(optimizer.param_groups)]


def _spelled(kind: list[str | int]) -> str:
    name, num_groups = kind
    return str(name) if num_groups == 1 else f"{name} in {num_groups} groups"
