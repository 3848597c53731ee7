"""What looks inside: asks the ranks, and returns what a notebook shows (kernel)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ddpnb.cluster.cluster import Cluster
from ddpnb.history.recorder import new_id
from ddpnb.protocol import calls
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.inspection import InspectSpec
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.inside.buckets import DdpInspection
from ddpnb.reports.inside.replicas import Finding, ReplicaCheck, find, measured, with_causes
from ddpnb.session.asking import ask
from ddpnb.session.comparison import with_devices
from ddpnb.session.errors import warn_stale

# -- are the replicas the same? ------------------------------------------------------------


def check_replicas(cluster: Cluster, names: Sequence[str]) -> ReplicaCheck:
    """Compare what the ranks hold: by digests, then by the values of what differs first."""
    if len(cluster.ranks) < 2:
        raise UserError("There is one rank, and nothing to compare it with: %ddp_restart -n 2.")
    replicas = list(ask(cluster, calls.digests(tuple(names))).values())
    if not any(each.held for each in replicas):
        raise UserError(
            "No rank has a model or an optimizer: make one in a %%ddp cell, or name what to "
            "compare, %ddp_check x."
        )
    found = [_measure(cluster, each) for each in find(replicas)]
    return ReplicaCheck(findings=with_causes(found, replicas), ranks=tuple(cluster.ranks))


def _measure(cluster: Cluster, finding: Finding) -> Finding:
    """Return a finding with the size of its first difference, if it has one."""
    if not finding.chunks:
        return finding
    ranks = finding.measured_ranks
    wanted = finding.name, finding.part, finding.tensor, finding.chunks
    found = ask(cluster, calls.elements(ranks, *wanted))
    return measured(finding, [each for rank in ranks if (each := found[rank]) is not None])


# -- what happens in a step of DDP? --------------------------------------------------------

INSPECTED = ("task", "batch_size", "devices", "as_", "link")
"""The options of a training that count in an inspection."""


def training_to_inspect(
    model: str, given: Mapping[str, Any], last: TrainingSpec | None
) -> TrainingSpec:
    """Return the training to inspect; of a model on the ranks, only the devices count.

    ``given`` are fields of it: ``INSPECTED``, or a cell's.  Without any task it is ``last``, the
    training of the latest comparison.
    """
    if model and not {"task", "source", "batch_size"}.isdisjoint(given):
        raise UserError(f"Inspect {model} or a task, with its --batch-size: leave one out.")
    if model:
        return TrainingSpec(task="digits", **given)
    if "task" in given or "source" in given:
        return TrainingSpec(**given)
    if last is None:
        raise UserError(
            'Name what to inspect: a model of the ranks, %ddp_inspect model --batch "x, y", '
            "or a task, %ddp_inspect --task digits."
        )
    return replace(last, **given)


def inspect_step(cluster: Cluster, spec: InspectSpec, training: TrainingSpec) -> DdpInspection:
    """Make steps of DDP on all ranks, which are idle; return what happened in them.

    ``spec`` has no task and no devices yet: ``training`` says them.

    Raises:
        UserError: there is no such model on some ranks, or it differs, or does not fit the batch.
        RankError: the user's code failed in a step.
    """
    if len(cluster.ranks) == 1:
        raise UserError(
            "One rank alone sends nothing: start more with %ddp_start -n 2, then inspect again."
        )
    task = None if spec.model else RunSpec(run_id=new_id(), strategy="ddp", **asdict(training))
    spec = replace(spec, task=task, devices=with_devices(cluster, training).emulated)
    warn_stale(cluster.ensure_group())
    found = ask(cluster, calls.find_inspected(spec))
    shapes = {rank: list(each.parameters.items()) for rank, each in found.items()}
    if others := sorted(rank for rank, each in shapes.items() if each != shapes[0]):
        raise UserError(
            f"{spec.title} has other parameters on {spoken_ranks(others)} than on rank 0: "
            "DDP needs the same on every rank."
        )
    unused = {
        name: ranks
        for name in found[0].parameters
        if (ranks := tuple(rank for rank in sorted(found) if name in found[rank].unused))
    }
    reports = ask(cluster, calls.inspect_ddp(replace(spec, finds_unused=bool(unused))))
    over = "" if spec.devices is None else f" on {spec.devices.text}"
    return DdpInspection(
        title=f"{spec.title}{over}",
        unused=unused,
        reports=tuple(reports[rank] for rank in sorted(reports)),
    )
