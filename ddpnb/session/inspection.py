"""Inspects models and training steps on the ranks, and returns the results.  Runs in the kernel."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.group import ensure_group
from ddpnb.protocol.calls import calls
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.inspection import InspectSpec
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.inspection.buckets import DdpInspection
from ddpnb.reports.inspection.replicas import (
    Finding,
    ReplicaCheck,
    findings_of,
    with_causes,
    with_size,
)
from ddpnb.results.recorder import new_id
from ddpnb.session.asking import ask
from ddpnb.session.comparison import with_devices
from ddpnb.session.errors import warn_stale

# -- are the replicas the same? ------------------------------------------------------------


def check_replicas(cluster: Cluster, names: Sequence[str]) -> ReplicaCheck:
    """Compare digests of the ranks' replicas, then compare the values at the first difference."""
    if len(cluster.ranks) < 2:
        raise UserError("A check needs at least two ranks. Run %ddp_restart -n 2 first.")
    replicas = list(ask(cluster, calls.digests(tuple(names))).values())
    if not any(each.held for each in replicas):
        raise UserError(
            "No rank has a model or an optimizer. Create a model in a %%ddp cell, or name a "
            "variable to compare, such as %ddp_check x."
        )
    found = [_measure(cluster, each) for each in findings_of(replicas)]
    return ReplicaCheck(findings=with_causes(found, replicas), ranks=tuple(cluster.ranks))


def _measure(cluster: Cluster, finding: Finding) -> Finding:
    """Add the size of the first difference to a finding, if the replicas differ."""
    if not finding.chunks:
        return finding
    ranks = finding.measured_ranks
    wanted = finding.name, finding.part, finding.tensor, finding.chunks
    found = ask(cluster, calls.elements(ranks, *wanted))
    return with_size(finding, [each for rank in ranks if (each := found[rank]) is not None])


# -- what happens in a step of DDP? --------------------------------------------------------

INSPECTED = ("task", "batch_size", "devices", "as_", "link")
"""The training options that an inspection uses."""


def training_to_inspect(
    model: str, given: Mapping[str, Any], last: TrainingSpec | None
) -> TrainingSpec:
    """Return options for an inspection.  A model on the ranks needs only the device options.

    ``given`` has the options that the user chose.  If the user chose neither a model nor a task,
    take the other options from ``last``, the training of the latest comparison.
    """
    if model and not {"task", "source", "batch_size"}.isdisjoint(given):
        raise UserError(f"Inspect either {model} or a task (with --batch-size), not both.")
    if model:
        return TrainingSpec(task="digits", **given)
    if "task" in given or "source" in given:
        return TrainingSpec(**given)
    if last is None:
        raise UserError(
            'Name a model on the ranks, such as %ddp_inspect model --batch "x, y", '
            "or a task, such as %ddp_inspect --task digits."
        )
    return replace(last, **given)


def inspect_step(cluster: Cluster, spec: InspectSpec, training: TrainingSpec) -> DdpInspection:
    """Run DDP steps on all ranks, and return the ranks' reports.  All ranks must be idle.

    The task and the devices in ``training`` are added to ``spec``.

    Raises:
        UserError: the model is missing or different on some ranks, or does not fit the batch.
        RankError: the user's code failed in a step.
    """
    if len(cluster.ranks) == 1:
        raise UserError("A single rank sends nothing. Run %ddp_restart -n 2, then inspect again.")
    task = None if spec.model else RunSpec(run_id=new_id(), strategy="ddp", **asdict(training))
    spec = replace(spec, task=task, devices=with_devices(cluster, training).emulated)
    warn_stale(ensure_group(cluster))
    found = ask(cluster, calls.find_inspected(spec))
    shapes = {rank: list(each.items()) for rank, (each, _) in found.items()}
    if others := sorted(rank for rank, each in shapes.items() if each != shapes[0]):
        raise UserError(
            f"{spec.title} has other parameters on {spoken_ranks(others)} than on rank 0. "
            "DDP needs the same parameters on every rank."
        )
    unused = {
        name: ranks
        for name in found[0][0]
        if (ranks := tuple(rank for rank, (_, names) in sorted(found.items()) if name in names))
    }
    reports = ask(cluster, calls.inspect_ddp(replace(spec, finds_unused=bool(unused))))
    over = "" if spec.devices is None else f" on {spec.devices.text}"
    return DdpInspection(
        title=f"{spec.title}{over}",
        unused=unused,
        reports=tuple(reports[rank] for rank in sorted(reports)),
    )
