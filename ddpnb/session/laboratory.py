"""Which devices does a comparison emulate, and how fast is each?  (Kernel.)"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ddpnb.cluster.cluster import Cluster
from ddpnb.protocol import calls
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.cell_output import PrintedLines
from ddpnb.session.asking import ask

Training = TypeVar("Training", bound=TrainingSpec)


def with_devices(cluster: Cluster, spec: Training) -> Training:
    """Return a training with its devices: its own, those of the ranks, or what a link is between.

    Raises:
        UserError: these ranks cannot stand for the devices.
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
