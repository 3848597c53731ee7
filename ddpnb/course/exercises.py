"""Hints for all exercises, and a function that calls an exercise's check.

The check of an exercise is a function.  The function's parameters have the names of the variables
that the student must define.  The check raises ``Hint`` if the student's solution is wrong.
Runs in the kernel and on the ranks.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[..., None]

HINTS = {
    "1.1": "Divide two speeds. Eight devices are at most eight times as fast as one device.",
    "1.2": "Train the same strategies again, and change one option.",
    "2.1": "If every rank sends first, no rank receives. dist.isend returns at once.",
    "2.2": "Add all tensors on rank 0 and broadcast the sum. Or send tensors around N - 1 times.",
    "3.1": "All-reduce p.grad of each parameter p, then divide it by the number of ranks.",
    "3.2": "If you seed torch.randperm's generator with the epoch, all ranks get the same order.",
    "3.3": "Join the gradients with torch.cat, all-reduce the result, and copy the parts back.",
    "4.1": "Divide each loss by the number of batches. Run all backward passes except the last one "
    "inside net.no_sync().",
    "4.2": "DistributedDataParallel has an option for parameters that a step does not use.",
    "5.1": "Each row of steps() is one update of one worker. The staleness is a column.",
    "5.2": "Divide the learning rate by the staleness, but never by less than one.",
    "6.1": "Under torch.no_grad(), all-reduce each parameter and divide it by the number of ranks.",
    "6.2": "Give torch.optim.Adam only this rank's parameters. Broadcast them after each step.",
    "7.1": "Read the table of the prediction. It has one column for each number of ranks.",
    "7.2": "Rank 0 writes to another name, then calls os.replace. All ranks read the renamed file.",
    "8.1": "Repeat or leave out samples until every rank has the same number of batches.",
    "8.2": "A forward pass of a DDP model may exchange buffers. Call the inner model, net.module.",
}
"""Maps the number of each exercise to a general hint."""


class Hint(Exception):  # noqa: N818 - students read it
    """Raised if a solution is wrong.  The text explains the mistake without the solution."""


def check(exercise: Check, variables: Mapping[str, Any]) -> None:
    """Call an exercise's check with the variables that the student defined.

    Args:
        exercise: the check.
        variables: the variables of the notebook or of a rank.

    Raises:
        Hint: a variable is missing, or its value is wrong.
    """
    names = list(inspect.signature(exercise).parameters)
    missing = [name for name in names if variables.get(name, ...) is ...]
    if missing:
        raise Hint(
            f"{' and '.join(missing)} is not defined. Fill in the cell above, and run this cell."
        )
    exercise(*(variables[name] for name in names))


def expect(right: bool, hint: str) -> None:
    """Raise ``Hint`` unless the student's result is right."""
    if not right:
        raise Hint(hint)
