"""The check of a comparison: what is trained, and that it can be (kernel)."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ddpnb.cluster.cluster import Cluster
from ddpnb.history.recorder import Recorder
from ddpnb.history.store import Store
from ddpnb.protocol import calls
from ddpnb.protocol.catalogue import BASELINE, CEILING, STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Checked, RunSpec
from ddpnb.protocol.notation import parse_strategy, spoken_ranks
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.cell_output import PrintedLines
from ddpnb.reports.formatting import counted
from ddpnb.reports.live import Live
from ddpnb.session.asking import ask
from ddpnb.session.comparison_spec import ComparisonSpec, long_enough
from ddpnb.session.errors import warn_stale
from ddpnb.session.evaluation_budget import budgeted
from ddpnb.session.training import RunningComparison, clean_up


def prepare(cluster: Cluster, store: Store, spec: ComparisonSpec, shown: Live) -> RunningComparison:
    """Check that every strategy can be trained; return the training of them all.

    A UserError says what cannot be trained.
    """
    if cluster.spans_hosts:
        check_across_hosts(spec.strategies)
    printed = PrintedLines()
    shown.announce(f"Checking the model and the data on {counted(len(cluster.ranks), 'rank')} ...")
    try:
        spec = replace(spec, training=with_devices(cluster, spec.training))
        specs = spec.run_specs(store.models)
        if len(cluster.ranks) == 1:  # a rank alone never communicates
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
    specs = long_enough(specs, max((each.num_epochs for each in checked.values()), default=0.0))
    specs = budgeted(specs, checked.values(), len(cluster.ranks))
    recorder = Recorder(
        store,
        name=spec.name,
        task=spec.training.task,
        source=spec.training.source,
        specs=specs,
        ranks=cluster.states,
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
    """Refuse strategies that need the memory of one host."""
    for name in (parse_strategy(each).name for each in strategies):
        if name in STRATEGIES and (instead := STRATEGIES[name].across_hosts):
            raise UserError(
                f"{name} trains in the memory of one host, and the ranks are on several: compare "
                f"{instead}."
            )


def _check_each(
    cluster: Cluster,
    spec: ComparisonSpec,
    specs: Sequence[RunSpec],
    shown: Live,
    printed: PrintedLines,
) -> dict[str, Checked]:
    """Check every strategy on the ranks; return what was found of those that can be trained.

    The baseline and the ceiling that were added to the user's own classes alone may be left out:
    these may train what no other strategy can, such as a model with two losses.
    """
    is_own = all(parse_strategy(s).name not in STRATEGIES for s in spec.strategies)
    optional = {BASELINE, CEILING}.difference(spec.strategies) if is_own else set()
    checked: dict[str, Checked] = {}
    left_out: dict[str, list[str]] = {}
    by_strategy = {run_spec.strategy: run_spec for run_spec in specs}
    for number, (name, each) in enumerate(by_strategy.items(), start=1):
        shown.announce(
            f"Checking {name}, strategy {number} of {len(by_strategy)}: the model, the data "
            f"and a step on {counted(len(cluster.ranks), 'rank')} ..."
        )
        warn_stale(cluster.ensure_group())  # the last check may have freed slow ranks
        try:
            found = ask(cluster, calls.validate(each), printed=printed)
            _check_sizes(found)
            checked[name] = found[0]
        except UserError as error:
            if name not in optional:
                raise
            left_out.setdefault(str(error), []).append(name)
    for why, names in left_out.items():
        print(f"Not trained: {' and '.join(names)}. {why}", file=sys.stderr)
    return checked


def _check_sizes(found: Mapping[int, Checked]) -> None:
    """Refuse a training split of different sizes on the ranks."""
    by_size: dict[int, list[int]] = {}
    for rank, checked in sorted(found.items()):
        by_size.setdefault(checked.num_samples, []).append(rank)
    if len(by_size) > 1:
        sizes = [f"{size} samples on {spoken_ranks(on)}" for size, on in by_size.items()]
        raise UserError(
            f"data('train') has {' and '.join(sizes)}; return the same data on every rank, "
            "each rank trains on its own part."
        )


def _check_target(spec: ComparisonSpec, checked: Collection[Checked]) -> None:
    """Refuse a target that is not measured."""
    target = spec.options.target
    if target is None or not target.is_accuracy:
        return
    if spec.training.eval_every == 0:
        raise UserError(
            f"--target accuracy={target.value:g} needs evaluations while it trains: "
            "leave --eval-every 0 out."
        )
    if not all(each.has_accuracy for each in checked):
        raise UserError(
            f"--target accuracy={target.value:g}: this task has no held-out accuracy: its "
            "targets are no class numbers, or it has a loss or measures of its own; let metric "
            "return 'accuracy', or give a training loss."
        )


def with_devices(cluster: Cluster, spec: TrainingSpec) -> TrainingSpec:
    """Return a training with its devices: its own, those of the ranks, or what a link is between.

    A UserError says why these ranks cannot stand for them.
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
            raise UserError(f"{option} describes emulated devices: add --devices 8xV100.")
        return made
    if cluster.spans_hosts:
        raise UserError(
            "Emulated devices are ranks of one host: %ddp_start without --hosts, or leave "
            "--devices and --link out."
        )
    if any(state.device != "cpu" for state in cluster.states):
        raise UserError(
            "Emulated devices are ranks on CPUs, and these are on GPUs, whose time is measured: "
            "%ddp_start --device cpu, or leave --devices and --link out."
        )
    if devices.num != num_ranks:
        raise UserError(
            f"--devices {made.devices} takes {devices.num} ranks, and there are {num_ranks}: "
            f"type %ddp_stop, then %ddp_start -n {devices.num}."
        )
    return made


def with_compute(
    cluster: Cluster, specs: Sequence[RunSpec], printed: PrintedLines
) -> tuple[RunSpec, ...]:
    """Return trainings that say how fast a device computes: measured once, the same for all."""
    devices = specs[0].emulated if specs else None
    if devices is None or devices.compute is not None:
        return tuple(specs)
    compute = ask(cluster, calls.measure_compute(specs[0]), printed=printed)[0]
    assert compute is not None
    return tuple(replace(spec, compute=compute.text) for spec in specs)
