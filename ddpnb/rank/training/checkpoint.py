"""How does a training go on after its end?  (Every rank.)

    FOLDER/RUN/step-00000040/rank-0-of-2.pt    what rank 0 needs to go on after 40 steps
    FOLDER/RUN/model.pt                        the trained model, in the end

A file is there whole or not at all, and a checkpoint counts once all its parts are there:
a kill at any moment leaves the one before it.  Where ranks drift apart, more stay until the
slowest has written its parts.  Nothing is unpickled: ``weights_only``.
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
"""Complete checkpoints of a run that stay, and all newer ones."""
NUM_OWN_FOLDERS = 3
"""Folders above a checkpoint's file that may be new: of the step, the run, all runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which part of a run's checkpoints is this rank's."""

    folder: Path
    """The run's own."""
    part: int
    num_parts: int

    def path(self, step: int) -> Path:
        """Return the file of this part, after so many steps."""
        return self.folder / f"step-{step:08}" / self.name(self.part)

    def name(self, part: int) -> str:
        """Return what the file of a part is called."""
        return f"rank-{part}-of-{self.num_parts}.pt"


@final
class Checkpoints:
    """Writes one rank's part of a run's checkpoints.

    A disk that refuses does not stop the training: that is said once.

    Args:
        place: where.
        every: steps between checkpoints.
        tell: takes a few words, the first time that the disk refuses.
    """

    def __init__(self, place: Place, *, every: int, tell: Callable[[str], None]) -> None:
        self._place = place
        self._every = every
        self._tell = tell
        self._num_made = 0
        self._last = 0
        self._told = False

    def after(self, num_steps: int, take: Callable[[], State], *, is_last: bool = False) -> None:
        """Write a checkpoint if it is time to.

        Args:
            num_steps: global batches trained on so far.
            take: returns what to keep.
            is_last: whether none will follow.
        """
        if not self.is_due(num_steps, is_last=is_last):
            return
        self._num_made = num_steps // self._every
        self._last = num_steps
        if self._write(self._place.path(num_steps), take()):
            self._remove_old()

    def is_due(self, num_steps: int, *, is_last: bool = False) -> bool:
        """Tell whether it is time for a checkpoint, after so many global batches."""
        is_new = num_steps > self._last
        return num_steps // self._every > self._num_made or (is_last and is_new)

    def begin_at(self, num_steps: int) -> None:
        """Count from a step on: what lies before is another run's."""
        self._num_made = num_steps // self._every

    def finish(self, model: nn.Module) -> None:
        """Write the trained model."""
        self._write(self._place.folder / MODEL_FILE, model.state_dict())

    def _write(self, path: Path, state: State) -> bool:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, state)
        except OSError as error:
            if not self._told:
                self._told = True
                self._tell(f"no checkpoint: {error.strerror or error}")
            return False
        return True

    def _remove_old(self) -> None:
        """Remove all that is older than the newest complete checkpoints.

        Where ranks drift apart, these may be far behind.  No rank writes what is older than
        they are any more, so whichever rank comes by removes the parts of all.
        """
        complete = [folder for folder in _folders(self._place) if _is_complete(folder, self._place)]
        if len(complete) < NUM_KEPT:
            return
        for folder in _folders(self._place):
            if folder < complete[-NUM_KEPT]:
                with contextlib.suppress(OSError):  # another rank is at it, too
                    for path in folder.iterdir():
                        path.unlink(missing_ok=True)
                    folder.rmdir()


def write(path: Path, state: State) -> None:
    """Write a file so that it is there whole or not at all, also where the machine goes down.

    Raises:
        OSError: the disk refuses; nothing is left of it.
    """
    content = io.BytesIO()
    torch.save(state, content)
    atomic_write(path, content.getbuffer(), synced_folders=path.parents[:NUM_OWN_FOLDERS])


def last_step(place: Place) -> int:
    """Return after how many steps the last complete checkpoint of a run was made.

    Raises:
        UserError: there is none, or it has another number of parts.
    """
    for folder in reversed(_folders(place)):
        if _is_complete(folder, place):
            return int(folder.name.removeprefix("step-"))
    others = {path.stem.split("-")[-1] for path in place.folder.glob("step-*/rank-*-of-*.pt")}
    if others - {str(place.num_parts)}:
        raise UserError(
            f"The run to resume was trained by {others.pop()} ranks, not {place.num_parts}: "
            "start as many with %ddp_restart -n."
        )
    raise UserError(
        f"There is no complete checkpoint of the run to resume ({place.folder.name}): "
        "train it with --save-every first."
    )


def _folders(place: Place) -> list[Path]:
    """Return the folders of all checkpoints of a run, the oldest first."""
    return sorted(place.folder.glob("step-*"))


def _is_complete(folder: Path, place: Place) -> bool:
    return all((folder / place.name(part)).is_file() for part in range(place.num_parts))


def read(place: Place, spec: RunSpec) -> State:
    """Return this rank's part of the last complete checkpoint.

    Raises:
        UserError: there is none, or it is of another training.
    """
    path = place.path(last_step(place))
    try:
        state: State = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"The checkpoint {path} cannot be read ({type(error).__name__}): "
            "it is damaged, or not one of ddpnb's."
        ) from error
    check_spec(state["spec"], spec)
    return state
