"""The notes that tables show for a strategy, for example on failed runs.  Runs in the kernel."""

from collections.abc import Sequence

from ddpnb.protocol.messages import Mark
from ddpnb.results.run import RunSnapshot, Status, ending


def notes_of(runs: Sequence[RunSnapshot]) -> tuple[str, ...]:
    """Return the notes on emulation, failures, faults and diverged losses of a strategy's runs."""
    notes = [note for run in runs for note in run.notes]
    for run in runs:
        if run.status not in (Status.RUNNING, Status.FINISHED) or run.detail:
            notes.append(ending(run.status, run.detail))
    diverged = sum(run.num_diverged for run in runs)
    notes += [_described(mark, run) for run in runs for mark in run.marks if mark.seconds > 0]
    if diverged:
        notes.append(f"{diverged} {'loss was' if diverged == 1 else 'losses were'} NaN or infinite")
    return tuple(dict.fromkeys(notes))


def _described(mark: Mark, run: RunSnapshot) -> str:
    """Return the note on a mark, such as the death of a rank."""
    text = f"rank {mark.rank} {mark.text} at {mark.seconds:.1f} s"
    on_purpose = () if run.spec is None else run.spec.kill
    if mark.kind.is_death and not any(kill.startswith(f"{mark.rank}@") for kill in on_purpose):
        return f"{text}; the results may lack the steps of this rank's last half second"
    return text
