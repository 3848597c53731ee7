"""What ``%ddp_inspect`` asks of the ranks: steps of DDP and of async (kernel)."""

import math
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast, final

from ddpnb.cluster.cluster import Cluster
from ddpnb.history.comparison import Comparison
from ddpnb.history.recorder import new_id
from ddpnb.history.store import Store
from ddpnb.protocol import calls
from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.inspection import InspectSpec
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.notation import parse_strategy, spoken_ranks
from ddpnb.protocol.options import check_options, option
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.inside.buckets import DdpInspection
from ddpnb.reports.inside.versions import AsyncInspection, async_inspection
from ddpnb.reports.result import ComparisonResult
from ddpnb.session.asking import ask
from ddpnb.session.comparison import prepare, with_devices
from ddpnb.session.comparison_spec import ComparisonSpec
from ddpnb.session.errors import CellInterrupt, warn_stale
from ddpnb.session.training import Training

ONE_RANK = "One rank alone sends nothing: start more with %ddp_start -n 2, then inspect again."
MOST_EPOCHS = 1000.0
STEPS_PER_RANK = 24
"""Fewest steps per rank of an asynchronous run, before it is stopped."""
AFTER_DEATH_SECONDS = 0.5
"""How long the others train on after a death, so that the picture shows it."""
MOST_SECONDS = 60.0
"""Longest asynchronous run to inspect, in seconds."""
STRATEGIES = ("ddp", "async")
"""Those that can be inspected."""
INSPECTED = ("batch_size", "devices", "as_", "link", "slow", "kill")
"""The options of a training that count here, besides its task."""
NOTHING = (
    'Name what to inspect: a model of the ranks, %ddp_inspect model --batch "x, y", or a task, '
    "%ddp_inspect --task digits."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionRequest:
    """What the user wants to look into; without a model or a task, that of the last comparison."""

    model: str = ""
    """An expression on the ranks, as ``batch`` and ``loss`` are."""
    batch: str = option(
        "",
        "the model's input on the ranks: a tensor, or a tuple or a dict of its arguments",
        example="EXPR",
    )
    loss: str = option("", "a scalar made of `output`; by default its mean", example="EXPR")
    strategy: str = option("ddp", "ddp | async, with options as async:bound=1", example="NAME")
    bucket_caps: tuple[float, ...] = option(
        (),
        "also with these bucket_cap_mb",
        flag="--bucket-cap",
        above=0,
        most_values=9,
        example="MB,MB",
    )
    training: TrainingSpec
    """The task, where ``has_task``, and the options named in ``given``."""
    has_task: bool = False
    given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_options(self)
        name = parse_strategy(self.strategy).name
        if name not in STRATEGIES:
            raise one_of("strategy to inspect", name, STRATEGIES)
        if name == "ddp" and name != self.strategy:
            raise UserError("--strategy ddp is inspected as it is: leave its options out.")
        if name == "async" and (self.model or self.bucket_caps):
            raise UserError(
                "--strategy async is shown with a task, --task digits or a %%ddp_inspect cell: "
                f"leave {'the model' if self.model else '--bucket-cap'} out."
            )
        flags = {"batch_size": "--batch-size", "slow": "--slow", "kill": "--kill"}
        unfit = set() if name == "async" else {"slow", "kill"}
        unfit |= {"batch_size"} if self.model else set()
        if wrong := [flag for given, flag in flags.items() if given in unfit & {*self.given}]:
            goes_with = "a task" if wrong[0] == "--batch-size" else "--strategy async"
            raise UserError(f"{wrong[0]} goes with {goes_with}: leave it out here.")
        if self.model and self.has_task:
            raise UserError(f"Inspect {self.model} or a task: leave one of them out.")
        beside = [each for each in ("batch", "loss") if getattr(self, each)]
        if beside and not self.model:
            raise UserError(f"--{beside[0]} goes with a model: a task has its own.")

    def task(self, last: TrainingSpec | None) -> TrainingSpec:
        """Return the training to inspect.

        Raises:
            UserError: none is named, and nothing was compared before.
        """
        if self.has_task:
            return self.training
        if last is None:
            raise UserError(NOTHING)
        return replace(last, **{name: getattr(self.training, name) for name in self.given})


def inspect(
    cluster: Cluster, request: InspectionRequest, last: TrainingSpec | None
) -> DdpInspection | AsyncInspection:
    """Make steps on the ranks, and return what happened in them.

    Args:
        cluster: its ranks are idle.
        request: what to inspect.
        last: the training of the latest comparison.
    """
    training = request.training if request.model else request.task(last)
    if len(cluster.ranks) == 1:
        raise UserError(ONE_RANK)
    if request.strategy.startswith("async"):
        return inspect_async(cluster, request.strategy, training)
    chosen = asdict(training) | {"data_seed": training.seed}
    spec = InspectSpec(
        task=None if request.model else RunSpec(run_id=new_id(), strategy="ddp", **chosen),
        model=request.model,
        batch=request.batch,
        loss=request.loss,
        bucket_caps=request.bucket_caps,
        devices=with_devices(cluster, training).emulated,
    )
    return inspect_ddp(cluster, spec)


def inspect_async(cluster: Cluster, strategy: str, training: TrainingSpec) -> AsyncInspection:
    """Train for a moment; return which versions each worker has read and written.

    What was trained is not stored.
    """
    short = replace(training, num_epochs=MOST_EPOCHS, eval_every=0.0, min_seconds=None, save=False)
    spec = ComparisonSpec(strategies=(strategy,), training=short, name="inspect", baseline=False)
    with tempfile.TemporaryDirectory(prefix="ddpnb-inspect-") as folder:
        store = Store(Path(folder))
        moment = _Moment(cluster, bool(short.kill))
        moment.training = running = prepare(cluster, store, spec, cast("Any", moment))
        running.grace_seconds = MOST_SECONDS  # an interrupt would cost the user's own DDP its group
        try:
            running.run()
        except CellInterrupt:
            if not moment.has_stopped:
                raise  # else only the model's evaluation, which nobody reads, was interrupted
        return async_inspection(running.recorder.comparison)


@final
class _Moment:
    """Stops a training once there are enough steps to draw; shows nothing itself."""

    def __init__(self, cluster: Cluster, awaits_death: bool) -> None:
        self._num_wanted = STEPS_PER_RANK * len(cluster.ranks)
        self._awaits_death = awaits_death
        self._began = time.monotonic()
        self.training: Training | None = None
        self.has_stopped = False

    def announce(self, text: str) -> None:
        """Show nothing."""

    def is_due(self) -> bool:
        """Look each time."""
        return True

    def update(self, comparison: Comparison) -> None:
        """Stop if there are enough steps, those after a death among them."""
        run = comparison.runs[-1] if comparison.runs else None
        if run is None or self.training is None:
            return
        ends = [mark.seconds + AFTER_DEATH_SECONDS for mark in run.marks if mark.kind.is_death]
        has_died = not self._awaits_death or run.seconds >= min(ends, default=math.inf)
        is_enough = run.num_events >= self._num_wanted and has_died
        if is_enough or time.monotonic() - self._began > MOST_SECONDS:
            self.has_stopped = True
            self.training.stop()

    def finish(self, result: ComparisonResult) -> None:
        """Show nothing."""


def inspect_ddp(cluster: Cluster, spec: InspectSpec) -> DdpInspection:
    """Make steps of DDP on all ranks; return what happened in them.

    Raises:
        UserError: there is no such model on some ranks, or it differs, or does not fit the batch;
            nothing has been sent then.
        RankError: the user's code failed in a step.
    """
    warn_stale(cluster.ensure_group())
    found = ask(cluster, calls.find_inspected(spec))
    shapes = {rank: [(p.name, p.shape) for p in each.parameters] for rank, each in found.items()}
    if others := sorted(rank for rank, each in shapes.items() if each != shapes[0]):
        raise UserError(
            f"{spec.title} has other parameters on {spoken_ranks(others)} than on rank 0: "
            "DDP needs the same on every rank."
        )
    unused = {
        each.name: tuple(rank for rank in sorted(found) if each.name in found[rank].unused)
        for each in found[0].parameters
    }
    unused = {name: ranks for name, ranks in unused.items() if ranks}
    reports = ask(cluster, calls.inspect_ddp(replace(spec, finds_unused=bool(unused))))
    over = "" if spec.devices is None else f" on {spec.devices.text}"
    return DdpInspection(
        title=f"{spec.title}{over}",
        unused=unused,
        reports=tuple(reports[rank] for rank in sorted(reports)),
    )
