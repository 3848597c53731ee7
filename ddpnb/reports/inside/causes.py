"""Why replicas differ: the likely cause of each finding, from all of them together (kernel)."""

from collections.abc import Sequence
from dataclasses import replace

from ddpnb.protocol.notation import spoken_ranks
from ddpnb.protocol.replicas import Held, Part, RankReplica
from ddpnb.reports.formatting import listed
from ddpnb.reports.inside.replicas import Finding, Verdict

NO_DDP = "no variable leads to a DDP that holds the model"
ROUNDING = "So small that it may be rounding: sums were made in another order."


def with_causes(
    findings: Sequence[Finding], replicas: Sequence[RankReplica]
) -> tuple[Finding, ...]:
    """Return the findings, each with a sentence on what has probably led to it."""
    skipped = _skipped_step(replicas)
    found = []
    for finding in findings:
        if not finding.cause:
            held = [each.held[finding.name] for each in replicas]
            if finding.verdict is Verdict.DIFFERENT and _is_by_design(finding, held):
                finding = replace(finding, verdict=Verdict.FACT)
            finding = replace(finding, cause=_cause(finding, held, findings, skipped))
        found.append(finding)
    return tuple(found)


def _cause(
    finding: Finding, held: Sequence[Held], findings: Sequence[Finding], skipped: str
) -> str:
    """Return the likely cause in a sentence or two; empty where nothing differs."""
    is_ddp = all(each.is_ddp for each in held)
    match finding.verdict, finding.part:
        case Verdict.UNKNOWN, _:
            return "Each rank holds another shard by design." if finding.num_sharded else ""
        case Verdict.SAME, Part.GRADIENTS if not is_ddp:
            return (
                f"The same, and {NO_DDP}: the code adds them up (is the sum divided by the number "
                "of ranks?), or all ranks train on the same samples (no DistributedSampler)."
            )
        case Verdict.SAME, _:
            return ""
        case _, Part.PARAMETERS:
            both = finding.name, Part.GRADIENTS
            gradients = next((f.verdict for f in findings if (f.name, f.part) == both), None)
            return _of_parameters(finding, gradients, skipped, is_ddp=is_ddp)
        case _, Part.GRADIENTS:
            return _of_gradients(finding, is_ddp=is_ddp)
        case _, Part.BUFFERS:
            return _of_buffers(finding, is_ddp=is_ddp)
        case _, Part.STATE:
            return _of_state(finding, skipped)
    return "Each rank has computed its own, from its own samples or random numbers."


def _of_parameters(
    finding: Finding, gradients: Verdict | None, skipped: str, *, is_ddp: bool
) -> str:
    if finding.texts or finding.lacking:
        return "The ranks have built different models."
    if skipped:
        return skipped
    if is_ddp and gradients is Verdict.DIFFERENT:
        return "Steps were made with gradients that DDP had not averaged."
    if is_ddp and finding.is_rounding:
        return ROUNDING
    if is_ddp:
        return (
            "DDP averages gradients, not weights: after it had copied rank 0's, a rank "
            "skipped a step, or changed its own weights (load_state_dict, if rank == 0)."
        )
    if gradients is None:
        return (
            f"No gradients yet, and {NO_DDP}: each rank has drawn its own initial weights; seed "
            "all alike first, or wrap the model in DDP, which copies rank 0's."
        )
    if gradients is Verdict.SAME:
        return (
            f"The gradients are the same now, and {NO_DDP}: the weights began apart (a seed), or "
            "a rank skipped a step."
        )
    return f"Nothing averages the gradients, as {NO_DDP}: each rank trains by itself."


def _of_gradients(finding: Finding, *, is_ddp: bool) -> str:
    if finding.lacking:
        return (
            f"{spoken_ranks(finding.lacking).capitalize()} made no backward pass, or called "
            "zero_grad() before the check."
        )
    if not is_ddp:
        return f"Nothing averages them, as {NO_DDP}: each rank's are those of its own samples."
    if finding.is_rounding:
        return ROUNDING
    return (
        "The last backward pass was made under no_sync() or by the module inside DDP, or a rank "
        "changed its gradients afterwards, as clipping by its own norm does."
    )


def _of_buffers(finding: Finding, *, is_ddp: bool) -> str:
    if not _is_statistic(finding.tensor):
        return "Each rank has updated it by itself; DDP averages gradients alone."
    if finding.verdict is Verdict.FACT:
        why = "by design: DDP sends rank 0's before the next forward pass. Save and evaluate those"
    elif is_ddp:
        why = "DDP was made with broadcast_buffers=False, so rank 0's are never sent"
    else:
        why = f"nothing sends rank 0's, as {NO_DDP}"
    return f"BatchNorm's statistics are of each rank's own samples: {why}."


def _is_by_design(finding: Finding, held: Sequence[Held]) -> bool:
    """Return whether these are statistics that DDP sends before the next forward pass."""
    return finding.part is Part.BUFFERS and all(
        each.is_ddp
        and each.syncs_buffers
        and all(map(_is_statistic, each.parts.get(Part.BUFFERS, ())))
        for each in held
    )


def _is_statistic(buffer: str) -> bool:
    """Return whether a buffer is one of BatchNorm's, by its name."""
    return buffer.endswith(("running_mean", "running_var", "num_batches_tracked"))


def _of_state(finding: Finding, skipped: str) -> str:
    if finding.lacking:
        return f"{spoken_ranks(finding.lacking).capitalize()} has made no step yet."
    return skipped or "It is made of gradients, and those of the ranks differ, or have differed."


def _skipped_step(replicas: Sequence[RankReplica]) -> str:
    """Return the sentence about optimizers that have made different numbers of steps."""
    for name in dict.fromkeys(name for each in replicas for name in each.num_steps):
        counts: dict[int, list[int]] = {}
        for each in replicas:
            counts.setdefault(each.num_steps.get(name, 0), []).append(each.rank)
        if len(counts) > 1:
            made = [f"{num} on {spoken_ranks(ranks)}" for num, ranks in sorted(counts.items())]
            return f"A rank skipped a step: {name} has counted {listed(made)}."
    return ""
