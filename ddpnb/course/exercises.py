"""What an exercise is: a check of what a student wrote, and hints.  (Kernel and ranks.)

A check is a function whose parameters are named as what the student had to define.  It raises
``Hint`` where that is wrong.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[..., None]

HINTS = {
    "1.1": "Divide two speeds; eight devices could reach eight times the speed of one.",
    "1.2": "Train the same strategies again, and change one option.",
    "2.1": "Where every rank sends first, none receives: dist.isend returns at once.",
    "2.2": "Gather on rank 0, add there, broadcast; or send around the ring N - 1 times.",
    "3.1": "All-reduce p.grad of each parameter p, then divide by the number of ranks.",
    "3.2": "torch.randperm with a generator seeded by the epoch is the same on all ranks.",
    "3.3": "Join the gradients into one tensor, reduce it, and copy the parts back.",
    "4.1": "Run all backward passes but the last inside net.no_sync(), and divide each loss.",
    "4.2": "DistributedDataParallel has an option for parameters that take no part in a step.",
    "5.1": "Every row of steps() is one update of one worker; its staleness is a column.",
    "5.2": "Divide the learning rate by the staleness, but never by less than one.",
    "6.1": "All-reduce each parameter and divide it, under torch.no_grad().",
    "6.2": "Give torch.optim.Adam this rank's parameters; after its step, each owner broadcasts.",
    "7.1": "Read the table of the prediction: one column for each number of ranks.",
    "7.2": "Rank 0 writes to another name and renames it with os.replace; all ranks read.",
    "8.1": "Repeat some samples, or leave some out, until each rank has as many batches.",
    "8.2": "A forward pass of a DDP model may exchange buffers: call what it wraps, net.module.",
}
"""What helps with each exercise, whatever went wrong."""


class Hint(Exception):  # noqa: N818 - students read it
    """A solution is wrong; the text says where to look, and is no solution."""


def check(exercise: Check, variables: Mapping[str, Any]) -> None:
    """Check what a student defined.

    Args:
        exercise: the check.
        variables: of the notebook, or of a rank.

    Raises:
        Hint: a variable is missing, or its value is wrong.
    """
    names = list(inspect.signature(exercise).parameters)
    missing = [name for name in names if variables.get(name, ...) is ...]
    if missing:
        raise Hint(
            f"{' and '.join(missing)} is not defined here: fill in the cell above and run it."
        )
    exercise(*(variables[name] for name in names))


def expect(right: bool, hint: str) -> None:
    """Give a hint unless something is right.

    Raises:
        Hint: it is wrong.
    """
    if not right:
        raise Hint(hint)
