"""Why replicas differ: the likely cause of each finding, from all of them together (kernel)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from ddpnb.protocol.notation import spoken_ranks
from ddpnb.protocol.replicas import Held, Part, RankReplica
from ddpnb.reports.formatting import listed
from ddpnb.reports.inside.replicas import Finding, Verdict


def with_causes(
    findings: Sequence[Finding], replicas: Sequence[RankReplica]
) -> tuple[Finding, ...]:
    """Return the findings, each with a sentence on what has probably led to it."""
    evidence = Evidence(findings=findings, replicas=replicas)
    return tuple(each if each.cause else evidence.judge(each) for each in findings)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the findings together say of one of them."""

    findings: Sequence[Finding]
    replicas: Sequence[RankReplica]

    def judge(self, finding: Finding) -> Finding:
        """Return the finding with its likely cause; expected where it is by design."""
        is_fact = finding.verdict is Verdict.DIFFERENT and self._is_by_design(finding)
        verdict = Verdict.FACT if is_fact else finding.verdict
        return replace(finding, verdict=verdict, cause=self._cause_of(finding))

    def _cause_of(self, finding: Finding) -> str:
        """Return the likely cause in a sentence or two; empty where nothing differs."""
        if finding.verdict is Verdict.UNKNOWN:
            return "Each rank holds another shard by design." if finding.num_sharded else ""
        if finding.verdict is Verdict.SAME:
            return self._same_work(finding)
        match finding.part:
            case Part.PARAMETERS:
                return self._parameters(finding)
            case Part.GRADIENTS:
                return self._gradients(finding)
            case Part.BUFFERS:
                return self._buffers(finding)
            case Part.STATE:
                return self._state(finding)
        return "Each rank has computed its own, from its own samples or random numbers."

    def _parameters(self, finding: Finding) -> str:
        if finding.first.texts or finding.first.lacking:
            return "The ranks have built different models."
        if skipped := self._skipped_step():
            return skipped
        gradients = self._of(finding.name, Part.GRADIENTS)
        if self._is_ddp(finding):
            if gradients is not None and gradients.verdict is Verdict.DIFFERENT:
                return "Steps were made with gradients that DDP had not averaged."
            if finding.first.is_rounding:
                return ROUNDING_CAUSE
            return (
                "DDP averages gradients, not weights: after it had copied rank 0's, "
                f"{_odd(finding)} skipped a step, or changed its own weights (load_state_dict, "
                "if rank == 0)."
            )
        if gradients is None:
            return (
                f"No gradients yet, and {NO_DDP}: each rank has drawn its own initial weights; "
                "seed all alike first, or wrap the model in DDP, which copies rank 0's."
            )
        if gradients.verdict is Verdict.SAME:
            return (
                f"The gradients are the same now, and {NO_DDP}: the weights began apart (a seed), "
                "or a rank skipped a step."
            )
        return (
            f"Nothing averages the gradients, as {NO_DDP}: each rank trains on its own samples, "
            "by itself."
        )

    def _gradients(self, finding: Finding) -> str:
        if finding.first.lacking:
            return (
                f"{spoken_ranks(finding.first.lacking).capitalize()} made no backward pass, "
                "or called zero_grad() before the check."
            )
        if not self._is_ddp(finding):
            return (
                f"Nothing averages them, as {NO_DDP}: each rank's are those of its own samples, as "
                "its sampler hands them out."
            )
        if finding.first.is_rounding:
            return ROUNDING_CAUSE
        return (
            "The last backward pass was made under no_sync() or by the module inside DDP, or a "
            "rank changed its gradients afterwards, as clipping by its own norm does."
        )

    def _buffers(self, finding: Finding) -> str:
        if not _is_statistic(finding.first.tensor):
            return "Each rank has updated it by itself; DDP averages gradients alone."
        own = "BatchNorm's statistics are of each rank's own samples"
        if self._is_by_design(finding):
            return (
                f"{own} after a forward pass in training, by design: DDP sends rank 0's before the "
                "next one. Save and evaluate rank 0's."
            )
        why = (
            "DDP was made with broadcast_buffers=False, so rank 0's are never sent"
            if self._is_ddp(finding)
            else f"nothing sends rank 0's, as {NO_DDP}"
        )
        return f"{own}: {why}. SyncBatchNorm, on GPUs, has common ones."

    def _is_by_design(self, finding: Finding) -> bool:
        """Return whether these are statistics that DDP sends before the next forward pass."""
        held = self._held(finding) if finding.part is Part.BUFFERS else []
        return bool(held) and all(
            each.is_ddp
            and each.syncs_buffers
            and all(map(_is_statistic, each.parts.get(Part.BUFFERS, ())))
            for each in held
        )

    def _state(self, finding: Finding) -> str:
        if finding.first.lacking:
            return f"{spoken_ranks(finding.first.lacking).capitalize()} has made no step yet."
        if skipped := self._skipped_step():
            return skipped
        parts = Part.GRADIENTS, Part.PARAMETERS
        if any(f.part in parts and f.verdict is Verdict.DIFFERENT for f in self.findings):
            return "It is made of gradients, and those of the ranks differ, or have differed."
        return "Averaged from gradients that differed once, or loaded on some ranks only."

    def _same_work(self, finding: Finding) -> str:
        if finding.part is not Part.GRADIENTS or self._is_ddp(finding):
            return ""
        return (
            f"The same, and {NO_DDP}: the code averages them by hand, or all ranks train on the "
            "same samples (no DistributedSampler)."
        )

    def _skipped_step(self) -> str:
        """Return the sentence about optimizers that have made different numbers of steps."""
        for name in dict.fromkeys(name for each in self.replicas for name in each.num_steps):
            counts: dict[int, list[int]] = {}
            for each in self.replicas:
                counts.setdefault(each.num_steps.get(name, 0), []).append(each.rank)
            if len(counts) > 1:
                made = [f"{num} on {spoken_ranks(ranks)}" for num, ranks in sorted(counts.items())]
                return f"A rank skipped a step: {name} has counted {listed(made)}."
        return ""

    def _held(self, finding: Finding) -> list[Held]:
        return [each.held[finding.name] for each in self.replicas]

    def _is_ddp(self, finding: Finding) -> bool:
        return all(each.is_ddp for each in self._held(finding))

    def _of(self, name: str, part: Part) -> Finding | None:
        return next((f for f in self.findings if (f.name, f.part) == (name, part)), None)


def _odd(finding: Finding) -> str:
    """Return the ranks that are alone against most others; ``"a rank"`` if none are."""
    groups = sorted(finding.first.groups, key=len)
    is_clear = len(groups) == 2 and len(groups[0]) < len(groups[1])
    return spoken_ranks(groups[0]) if is_clear else "a rank"


NO_DDP = "no variable leads to a DDP that holds the model"

ROUNDING_CAUSE = "So small that it may be rounding: sums were made in another order."


def _is_statistic(buffer: str) -> bool:
    """Return whether a buffer is one of BatchNorm's, by its name."""
    return buffer.endswith(("running_mean", "running_var", "num_batches_tracked"))
