"""Checks a comparison and prepares its runs.  Runs in the kernel."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.group import ensure_group
from ddpnb.output.cell_output import PrintedLines
from ddpnb.protocol.calls import calls
from ddpnb.protocol.catalogue import BASELINE, CEILING, STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Checked, RunSpec
from ddpnb.protocol.notation import parse_strategy, spoken_ranks
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.formatting import counted
from ddpnb.reports.live import Live
from ddpnb.reports.notebook import warn
from ddpnb.results.recorder import Recorder
from ddpnb.results.store import Store
from ddpnb.session.asking import ask
from ddpnb.session.comparison_spec import ComparisonSpec, long_enough
from ddpnb.session.errors import warn_stale
from ddpnb.session.evaluation_budget import budgeted
from ddpnb.session.training import RunningComparison, clean_up


def prepare(cluster: Cluster, store: Store, spec: ComparisonSpec, shown: Live) -> RunningComparison:
    """Check that every strategy can be trained, and return the comparison, ready to run.

    Raises UserError if a strategy cannot be trained.
    """
    if cluster.spans_hosts:
        check_across_hosts(spec.strategies)
    printed = PrintedLines()
    shown.announce(f"Checking the model and the data on {counted(len(cluster.ranks), 'rank')} ...")
    try:
        spec = replace(spec, training=with_devices(cluster, spec.training))
        specs = spec.run_specs(store.models)
        if len(cluster.ranks) == 1:  # a single rank never communicates
            specs = tuple(each for each in specs if not each.is_ceiling)
        if spec.functions is not None:
            spec.functions.send(cluster, cluster.ranks)
        checked = _check_each(cluster, spec, specs, shown, printed)
        _check_target(spec, checked.values())
        specs = with_compute(cluster, [s for s in specs if s.strategy in checked], printed)
    except BaseException:
        clean_up(cluster)
        printed.show()
        shown.announce("")
        raise
    specs = tuple(replace(s, notes=(*s.notes, *checked[s.strategy].notes)) for s in specs)
    for note in dict.fromkeys(note for each in checked.values() for note in each.notes):
        names = [name for name, each in checked.items() if note in each.notes]
        warn(f"{', '.join(names)}: {note}")
    specs = long_enough(specs, max((each.num_epochs for each in checked.values()), default=0.0))
    specs = budgeted(specs, checked.values(), len(cluster.ranks))
    recorder = Recorder(
        store,
        name=spec.name,
        task=spec.training.task,
        source=spec.training.source,
        specs=specs,
        ranks=cluster.states,
        notify=warn,
    )
    shown.update(recorder.comparison)
    return RunningComparison(
        cluster=cluster,
        recorder=recorder,
        specs=specs,
        checked=checked,
        live=shown,
        printed=printed,
        asked=spec,
    )


def check_across_hosts(strategies: Sequence[str]) -> None:
    """Raise UserError if a strategy cannot run on several hosts because it shares memory."""
    for name in (parse_strategy(each).name for each in strategies):
        if name in STRATEGIES and (instead := STRATEGIES[name].across_hosts):
            raise UserError(
                f"{name} works on one host only, but the ranks run on several hosts. Instead, "
                f"compare {instead}."
            )


def _check_each(
    cluster: Cluster,
    spec: ComparisonSpec,
    specs: Sequence[RunSpec],
    shown: Live,
    printed: PrintedLines,
) -> dict[str, Checked]:
    """Check every strategy on the ranks; return the results of the strategies that can train.

    If the user compares only custom strategies, the baseline and the ceiling may fail the check.
    For example, only a custom strategy can train a model with two losses.
    """
    is_own = all(parse_strategy(s).name not in STRATEGIES for s in spec.strategies)
    optional = {BASELINE, CEILING}.difference(spec.strategies) if is_own else set()
    checked: dict[str, Checked] = {}
    left_out: dict[str, list[str]] = {}
    by_strategy = {run_spec.strategy: run_spec for run_spec in specs}
    for number, (name, each) in enumerate(by_strategy.items(), start=1):
        shown.announce(
            f"Checking strategy {number} of {len(by_strategy)}, {name}: model, data and one step "
            f"on {counted(len(cluster.ranks), 'rank')} ..."
        )
        warn_stale(ensure_group(cluster))  # the last check may have released slow ranks
        try:
            found = ask(cluster, calls.validate(each), printed=printed)
            _check_sizes(found)
            checked[name] = found[0]
        except UserError as error:
            if name not in optional:
                raise
            left_out.setdefault(str(error), []).append(name)
    for why, names in left_out.items():
        warn(f"Not trained: {' and '.join(names)}. {why}")
    return checked


def _check_sizes(found: Mapping[int, Checked]) -> None:
    """Raise UserError if the training split has different sizes on the ranks."""
    by_size: dict[int, list[int]] = {}
    for rank, checked in sorted(found.items()):
        by_size.setdefault(checked.num_samples, []).append(rank)
    if len(by_size) > 1:
        sizes = [f"{size} samples on {spoken_ranks(on)}" for size, on in by_size.items()]
        raise UserError(
            f"data('train') has {' and '.join(sizes)}. Return the same data on every rank. "
            "ddpnb trains each rank on its own part."
        )


def _check_target(spec: ComparisonSpec, checked: Collection[Checked]) -> None:
    """Raise UserError if ``--target`` is an accuracy that the comparison does not measure."""
    target = spec.options.target
    if target is None or not target.is_accuracy:
        return
    if spec.training.eval_every == 0:
        raise UserError(
            f"--target accuracy={target.value:g} needs evaluations during training. "
            "Remove --eval-every 0."
        )
    if not all(each.has_accuracy for each in checked):
        raise UserError(
            f"--target accuracy={target.value:g} needs a held-out accuracy. ddpnb does not measure "
            "accuracy if targets are not class numbers, or if the task defines a loss or metrics. "
            "Return 'accuracy' from metric, or set a training loss as the target."
        )


def with_devices(cluster: Cluster, spec: TrainingSpec) -> TrainingSpec:
    """Add emulated devices to training options if the cluster or ``--link`` needs these devices.

    Raises UserError if these ranks cannot emulate the devices.
    """
    num_ranks = len(cluster.ranks)
    made = spec
    if not spec.devices and (cluster.spec.devices or spec.link):
        given = cluster.spec.devices or str(num_ranks)
        made = replace(spec, devices=given, as_=spec.as_ or cluster.spec.as_)
    devices = made.emulated
    if devices is None:
        described = {"--as": made.as_, "--compute": made.compute, "--device-link": made.device_link}
        for option in filter(described.get, described):
            raise UserError(f"{option} needs emulated devices. Add --devices 8xV100.")
        return made
    if cluster.spans_hosts:
        raise UserError(
            "Emulated devices need ranks on one host, but these ranks run on several hosts. "
            "Remove --devices and --link, or run %ddp_stop, then %ddp_start without --hosts."
        )
    if any(state.device != "cpu" for state in cluster.states):
        raise UserError(
            "Emulated devices need ranks on CPUs, but these ranks run on GPUs. "
            "Remove --devices and --link, or run %ddp_stop, then %ddp_start --device cpu."
        )
    if devices.num != num_ranks:
        raise UserError(
            f"--devices {made.devices} needs {devices.num} ranks, but the cluster has "
            f"{num_ranks}. Run %ddp_restart -n {devices.num} first."
        )
    return made


def with_compute(
    cluster: Cluster, specs: Sequence[RunSpec], printed: PrintedLines
) -> tuple[RunSpec, ...]:
    """Measure the speed of an emulated device once, and use this speed for all runs."""
    devices = specs[0].emulated if specs else None
    if devices is None or devices.compute is not None:
        return tuple(specs)
    compute = ask(cluster, calls.measure_compute(specs[0]), printed=printed)[0]
    assert compute is not None
    return tuple(replace(spec, compute=compute.text) for spec in specs)
