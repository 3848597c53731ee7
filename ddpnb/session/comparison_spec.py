"""What is compared, and the trainings that it takes (kernel)."""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace

from ddpnb.history.query import StoredRun, resolve
from ddpnb.history.recorder import new_id
from ddpnb.history.store import Store
from ddpnb.protocol.catalogue import BASELINE, CEILING, CELL_TASK, STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.notation import check_link, check_transport, has_transport
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.style import EVERYTHING, PlotOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSpec:
    """What to compare: strategies, and the training that is the same for all of them."""

    strategies: tuple[str, ...]
    """As the user writes them: ``"ddp"`` or ``"ddp:hook=fp16"``."""
    training: TrainingSpec
    num_repeats: int = 1
    name: str = ""
    baseline: bool = True
    """Whether ``single`` is trained too, as the reference of the speed-up, and ``no-comm``, as the
    ceiling of it."""
    options: PlotOptions = EVERYTHING

    def __post_init__(self) -> None:
        if not self.strategies:
            names = ", ".join(STRATEGIES)
            raise UserError(f"Name the strategies to compare, one or more of: {names}.")
        if errors := dict.fromkeys(filter(None, map(self._error_of, self.strategies))):
            raise UserError(" ".join(errors))
        transport = self.training.transport
        if transport != "auto" and not any(map(has_transport, self.strategies)):
            raise UserError(
                f"--transport {transport} is for asynchronous strategies, and there is none here: "
                "leave it out, or add async."
            )
        task = self.training.task
        if task != CELL_TASK and self.training.source.strip():
            raise UserError(
                f"--task {task} and a cell that defines the task: leave one of them out."
            )
        if self.num_repeats < 1:
            raise UserError(f"--repeats must be at least 1, not {self.num_repeats}.")

    def _error_of(self, strategy: str) -> str:
        """Return what is wrong with a strategy; empty if it can be trained."""
        try:
            check_transport(strategy, self.training.transport)
            check_link(strategy, self.training.link, self.training.transport)
        except UserError as error:
            return str(error)
        return ""

    def run_specs(self) -> tuple[RunSpec, ...]:
        """Return every training.

        Strategies take turns, and each repeat begins with another one, so that none is favoured.
        Each repeat has a seed of its own, which all its strategies share: weights, order of
        samples and dropout differ between repeats, and the data do not.
        """
        added = [BASELINE] if self.baseline else []
        if self.baseline and not {BASELINE, CEILING}.issuperset(self.strategies):
            added.append(CEILING)
        names = list(dict.fromkeys([*added, *self.strategies]))
        seed = self.training.seed
        chosen = asdict(self.training) | {"data_seed": seed}
        ceiling = chosen | {"is_ceiling": True, "save_every": 0.0, "resume": "", "kill": ()}
        return tuple(
            RunSpec(
                run_id=new_id(),
                strategy=name,
                repeat=repeat,
                **(ceiling if name == CEILING and name not in self.strategies else chosen)
                | {"seed": seed_of(seed, repeat)},
            )
            for repeat in range(self.num_repeats)
            for position in range(len(names))
            for name in [names[(position + repeat) % len(names)]]
        )


def seed_of(seed: int, repeat: int) -> int:
    """Return the seed of a repeat; the first one has that of the comparison."""
    return (seed + repeat) % 2**63


def long_enough(specs: Sequence[RunSpec], num_epochs: float) -> tuple[RunSpec, ...]:
    """Return trainings of so many epochs, for ``--min-seconds``, or of more; print what changes."""
    asked = max((spec.num_epochs for spec in specs), default=0.0)
    if num_epochs <= asked:
        return tuple(specs)
    rounded = math.ceil(num_epochs) if num_epochs > 10 else math.ceil(10 * num_epochs) / 10
    print(
        f"{rounded:g} epochs in place of {asked:g}, so that each run takes "
        f"{specs[0].min_seconds:g} s or more."
    )
    return tuple(replace(spec, num_epochs=float(rounded)) for spec in specs)


def with_checkpoints(
    specs: Sequence[RunSpec], asked: Collection[str], store: Store
) -> tuple[RunSpec, ...]:
    """Complete trainings with the folder of checkpoints and the run that each resumes.

    The user has written ``resume``, and ``asked`` for some strategies.  A baseline that was added
    to them is left out if the resumed comparison did not train it.

    Raises:
        UserError: there is no such run to resume.
    """
    if not any(spec.save_every or spec.resume for spec in specs):
        return tuple(specs)
    placed = [replace(spec, checkpoints=str(store.checkpoints)) for spec in specs]
    address = next(spec.resume for spec in placed if not spec.is_ceiling)
    if not address:
        return tuple(placed)
    runs = [run for run in resolve(address, store.list()) if not _is_ceiling(run)]
    names = {run.name for run in runs}
    if missing := [strategy for strategy in asked if strategy not in names]:
        raise UserError(
            f"{address} has no run of {missing[0]} to resume; it has: {', '.join(sorted(names))}."
        )
    found = []
    for spec in placed:
        if spec.is_ceiling:
            found.append(spec)
        elif spec.strategy in names:
            run = _resumed_by(spec, runs)
            seed = seed_of(spec.seed, run.repeat - spec.repeat)
            found.append(replace(spec, resume=run.run_id, resumed=run.address, seed=seed))
    return tuple(found)


def _is_ceiling(run: StoredRun) -> bool:
    """Return whether a run was trained only for its rate: it has no checkpoint."""
    return run.spec is not None and run.spec.is_ceiling


def _resumed_by(spec: RunSpec, runs: Sequence[StoredRun]) -> StoredRun:
    """Return the run that a training resumes: the same strategy and repeat, else the last one."""
    same = [run for run in runs if run.name == spec.strategy]
    return next((run for run in same if run.repeat == spec.repeat), same[-1])
