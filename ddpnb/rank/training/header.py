"""The header of a run: what a rank publishes before the first step.  Runs on the ranks."""

import torch
from torch.optim import SGD, Optimizer

from ddpnb.protocol.messages import RunHeader
from ddpnb.protocol.notation import parse_kills, parse_slow
from ddpnb.rank.training.run import TrainingRun
from ddpnb.rank.worker import Worker

_CEILING_NOTE = "This ceiling (upper bound) was trained briefly and timed, but not evaluated."


def header_of(run: TrainingRun, worker: Worker) -> RunHeader:
    """Return the header of the run, with its ranks, devices, data and notes."""
    plan, is_emulated = run.plan, run.spec.is_emulated
    of_plan = () if is_emulated else plan.notes
    own_notes = (*of_plan, *worker.notes, *run.task.notes, *run.spec.notes)
    return RunHeader(
        synchronous=plan.synchronous,
        num_workers=plan.num_workers,
        num_ranks=plan.num_ranks,
        num_threads=torch.get_num_threads(),
        device=run.state.device,
        backend=run.state.backend,
        num_parameters=sum(each.numel() for each in worker.model.parameters()),
        momentum=max(map(_momentum, worker.optimizers), default=0.0),
        num_samples=run.schedule.num_samples,
        num_devices=_num_devices(run),
        sees_exposed=plan.sees_exposed,
        is_emulated=plan.is_emulated and not is_emulated,
        notes=(_CEILING_NOTE,) if run.spec.is_ceiling else own_notes + tuple(_notes(run)),
    )


def _num_devices(run: TrainingRun) -> int:
    """Return the number of devices that the workers use: GPUs, or ranks' shares of the CPU."""
    num_workers = run.plan.num_workers
    if run.state.shares_device:
        return max(1, min(num_workers, torch.cuda.device_count()))
    return run.plan.num_devices or num_workers


def _notes(run: TrainingRun) -> list[str]:
    spec, plan = run.spec, run.plan
    faults = [(fault.rank, f"is {fault.text} on purpose") for fault in parse_slow(spec.slow)]
    for rank, seconds in parse_kills(spec.kill).items():
        faults.append((rank, f"is killed on purpose after {seconds:g} s of training"))
    found = [
        f"Rank {rank} {what}."
        if rank < plan.num_workers
        else f"Rank {rank} is not used by this strategy, so its fault has no effect."
        for rank, what in faults
    ]
    if spec.jitter:
        found.append(f"On purpose, random delays make steps up to {100 * spec.jitter:g} % longer.")
    if spec.batch_per_worker is not None and plan.num_workers > 1:
        found.append(
            f"Weak scaling: each worker gets {spec.batch_per_worker} samples per step. The "
            f"global batch has {spec.global_batch(plan.num_workers)} samples. The batch of "
            f"single has {spec.batch_per_worker} samples."
        )
    if run.state.shares_device and plan.num_ranks > 1:
        found.append("Several ranks share one GPU.")
    if spec.num_data_workers and not run.num_data_workers:
        found.append("--data-workers has no effect, because the data are tensors in memory.")
    return found


def _momentum(optimizer: Optimizer) -> float:
    """Return SGD's momentum; return 0 for Nesterov momentum and for all other optimizers."""
    groups = optimizer.param_groups if isinstance(optimizer, SGD) else []
    return max((0.0 if group["nesterov"] else group["momentum"] for group in groups), default=0.0)
