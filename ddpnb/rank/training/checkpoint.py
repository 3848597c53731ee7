"""The files from which a training is resumed (ranks).

    FOLDER/RUN/step-00000040/rank-0-of-2.pt    what rank 0 needs to go on after 40 steps
    FOLDER/RUN/model.pt                        the trained model, at the end

A file exists as a whole or not at all, and a checkpoint counts once all its parts exist.  So a kill
at any moment leaves the checkpoint before it.  If ranks drift apart, more checkpoints stay until
the slowest rank has written its parts.  Nothing is unpickled: files are read with ``weights_only``.
"""

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import nn

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import MODEL_FILE, RunSpec
from ddpnb.protocol.processes import atomic_write
from ddpnb.rank.strategies.base import State
from ddpnb.rank.training.checkpoint_compat import check_spec

NUM_KEPT = 2
"""Complete checkpoints of a run that are kept, besides all newer ones."""
NUM_OWN_FOLDERS = 3
"""Folders above a checkpoint's file that may be new: those of the step, the run and all runs."""


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


@final
class Checkpoints:
    """Writes one rank's part of a run's checkpoints.

    If the disk refuses, the training goes on and warns once.

    Args:
        part: this rank's.
        every: steps between checkpoints.
        first_step: steps of the run that was resumed.
        warn: takes a few words the first time that the disk refuses.
    """

    def __init__(
        self,
        part: CheckpointPart,
        *,
        every: int,
        first_step: int = 0,
        warn: Callable[[str], None],
    ) -> None:
        self._part = part
        self._every = every
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
        if not self.is_due(num_steps, is_last=is_last):
            return
        self._num_made = num_steps // self._every
        self._last = num_steps
        if self._write(self._part.path(num_steps), state()):
            self._remove_old()

    def is_due(self, num_steps: int, *, is_last: bool = False) -> bool:
        """Return whether a checkpoint is due after so many global batches."""
        is_new = num_steps > self._last
        return num_steps // self._every > self._num_made or (is_last and is_new)

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
