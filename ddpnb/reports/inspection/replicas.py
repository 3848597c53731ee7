"""Shows if replicas are equal, and the causes of differences.  Runs in the kernel."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ddpnb.protocol.inspection import Held, Part, RankReplica, TensorDigest
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.reports.formatting import counted, listed
from ddpnb.reports.kit import Shown
from ddpnb.reports.style import MUTED
from ddpnb.reports.table import Cell, Column, Table, table_row

MAX_SENT_CHUNKS = 16
"""Maximum number of chunks of one tensor that all measured ranks together send to the kernel."""
ROUNDING = 1e-5
"""Maximum difference, relative to the largest value, that may be a rounding error."""
MAX_SHOWN = 4
"""Maximum number of groups of ranks that a text lists."""
NO_DDP = "ddpnb found no DDP that wraps the model"
MAY_BE_ROUNDING = "Such a small difference may be rounding, if values were added in another order."


class PartVerdict(StrEnum):
    """The result of comparing one part, in the words that the table shows."""

    SAME = "✓ same"
    DIFFERENT = "✗ different"
    FACT = "· different"
    """The part differs by design."""
    UNKNOWN = "– not compared"


VERDICT_COLOURS = {PartVerdict.SAME: "#2b7a3d", PartVerdict.DIFFERENT: "#d1495b"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of comparing one part of a variable, for example the gradients of ``model``."""

    name: str
    part: Part = Part.VALUES
    verdict: PartVerdict = PartVerdict.UNKNOWN
    num_tensors: int = 0
    num_different: int = 0
    num_sharded: int = 0
    cause: str = ""

    tensor: str = ""
    """Name of the first tensor that differs.  The following fields describe this tensor."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Groups of ranks in which the tensor has the same values.  Empty if no tensor differs."""
    lacking: tuple[int, ...] = ()
    """Ranks that do not have this tensor."""
    texts: tuple[str, ...] = ()
    """Type and shape in each group (``"float32 [2]"``).  Empty if type and shape are equal."""
    chunks: tuple[int, ...] = ()
    """Indices of the tensor's chunks in which ddpnb measures the difference.  Can be empty."""
    num_elements: int = 0
    num_measured: int = 0
    num_unequal: int = 0
    """Number of measured elements that differ between ranks."""
    largest: float = math.nan
    """Largest difference between the values of the same element on two ranks."""
    scale: float = math.nan
    """Largest absolute value of the measured elements."""

    @property
    def label(self) -> str:
        """The name of the part in the table."""
        return self.name if self.part is Part.VALUES else f"{self.part} of {self.name}"

    @property
    def measured_ranks(self) -> tuple[int, ...]:
        """The ranks that ddpnb measures: the first rank of each group."""
        return tuple(ranks[0] for ranks in self.groups[:MAX_SENT_CHUNKS])

    @property
    def is_rounding(self) -> bool:
        """True if the difference is so small that it may be a rounding error."""
        return self.largest <= ROUNDING * self.scale


def findings_of(replicas: Sequence[RankReplica]) -> tuple[Finding, ...]:
    """Return a finding for each part of each variable."""
    found = []
    for name in dict.fromkeys(name for each in replicas for name in each.held):
        held = {each.rank: each.held[name] for each in replicas if name in each.held}
        if len(held) < len(replicas):
            cause = f"Only {spoken_ranks(tuple(held))} ran the code that creates {name}."
            found.append(Finding(name=name, cause=cause))
            continue
        for part in Part:
            if any(part in each.parts for each in held.values()):
                found.append(_compare(name, part, held))
    return tuple(found)


def _compare(name: str, part: Part, held: Mapping[int, Held]) -> Finding:
    tensors = {rank: each.parts.get(part, {}) for rank, each in held.items()}
    keys = list(dict.fromkeys(key for each in tensors.values() for key in each))
    different = [key for key in keys if len({each.get(key) for each in tensors.values()}) > 1]
    finding = Finding(
        name=name,
        part=part,
        verdict=PartVerdict.SAME if keys else PartVerdict.UNKNOWN,
        num_tensors=len(keys),
        num_different=len(different),
        num_sharded=max(each.sharded.get(part, 0) for each in held.values()),
    )
    if not different:
        return finding
    finding = replace(finding, verdict=PartVerdict.DIFFERENT, tensor=different[0])
    return _grouped(finding, {rank: each.get(different[0]) for rank, each in tensors.items()})


def _grouped(finding: Finding, tensors: Mapping[int, TensorDigest | None]) -> Finding:
    """Return the finding with groups of ranks that have the same values of the tensor."""
    groups: dict[TensorDigest, list[int]] = {}
    lacking: list[int] = []
    for rank, each in sorted(tensors.items()):
        (lacking if each is None else groups.setdefault(each, [])).append(rank)
    one, *others = groups
    texts, chunks = [], []
    if any((each.shape, each.kind) != (one.shape, one.kind) for each in others):
        texts = [f"{each.kind} {list(each.shape)}" for each in groups]
    elif others:
        numbers = range(one.num_chunks)
        chunks = [n for n in numbers if len({each.chunk(n) for each in groups}) > 1]
    return replace(
        finding,
        groups=tuple(map(tuple, groups.values())),
        lacking=tuple(lacking),
        texts=tuple(texts),
        chunks=tuple(chunks[: max(1, MAX_SENT_CHUNKS // len(groups))]),
        num_elements=math.prod(one.shape),
    )


def with_size(finding: Finding, values: Sequence[NDArray[Any]]) -> Finding:
    """Return the finding with the measured size of the difference.

    Args:
        finding: a finding with chunks to measure.
        values: the values of these chunks, as one array for each of the ``measured_ranks``.
    """
    stacked = np.stack(values)
    with np.errstate(all="ignore"):
        same = (stacked == stacked[0]) | ((stacked != stacked) & (stacked[0] != stacked[0]))
        differs = ~same.all(axis=0)
        apart = np.ptp(stacked[:, differs], axis=0)
        sizes = np.abs(stacked)
    found = replace(
        finding,
        num_measured=stacked.shape[1],
        num_unequal=int(differs.sum()),
        largest=float(apart.max(initial=0)),
        scale=float(np.max(sizes[np.isfinite(sizes)], initial=0)),
    )
    is_same = found.num_unequal == 0 and found.num_measured == found.num_elements
    if is_same and found.num_different == 1 and len(found.groups) <= MAX_SENT_CHUNKS:  # 0.0, -0.0
        return replace(finding, verdict=PartVerdict.SAME, num_different=0, groups=())
    return found


# -- the likely cause of each finding ------------------------------------------------------


def with_causes(
    findings: Sequence[Finding], replicas: Sequence[RankReplica]
) -> tuple[Finding, ...]:
    """Return the findings with their likely causes."""
    skipped = _skipped_step(replicas)
    found = []
    for finding in findings:
        if not finding.cause:
            held = [each.held[finding.name] for each in replicas]
            if finding.verdict is PartVerdict.DIFFERENT and _is_by_design(finding, held):
                finding = replace(finding, verdict=PartVerdict.FACT)
            finding = replace(finding, cause=_cause(finding, held, findings, skipped))
        found.append(finding)
    return tuple(found)


def _cause(
    finding: Finding, held: Sequence[Held], findings: Sequence[Finding], skipped: str
) -> str:
    """Return one or two sentences with the likely cause, or ``""`` if there is no difference."""
    is_ddp = all(each.is_ddp for each in held)
    thawed = max(each.num_thawed for each in held)
    if thawed and finding.verdict is not PartVerdict.SAME and finding.part is not Part.BUFFERS:
        return (
            "DDP wrapped the model while layers were frozen that train now. DDP does not average "
            f"the gradients of these {counted(thawed, 'parameter')}. Create DDP again after you "
            "unfreeze layers."
        )
    match finding.verdict, finding.part:
        case PartVerdict.UNKNOWN, _:
            return "Each rank has a different shard by design." if finding.num_sharded else ""
        case PartVerdict.SAME, Part.GRADIENTS if not is_ddp:
            return (
                f"The gradients are equal, but {NO_DDP}. Either your code sums the gradients (does "
                "it divide by the number of ranks?), or all ranks train on the same samples (no "
                "DistributedSampler)."
            )
        case PartVerdict.SAME, _:
            return ""
        case _, Part.PARAMETERS:
            both = finding.name, Part.GRADIENTS
            gradients = next((f.verdict for f in findings if (f.name, f.part) == both), None)
            return _of_parameters(finding, gradients, skipped, is_ddp=is_ddp)
        case _, Part.GRADIENTS:
            return _of_gradients(finding, is_ddp=is_ddp)
        case _, Part.BUFFERS:
            return _of_buffers(finding, is_ddp=is_ddp)
        case _, Part.STATE if finding.lacking:
            return f"{spoken_ranks(finding.lacking).capitalize()} did not take an optimizer step."
        case _, Part.STATE:
            return skipped or "The gradients differ now, or they differed in an earlier step."
    return "Each rank computed the values from its own samples or random numbers."


def _of_parameters(
    finding: Finding, gradients: PartVerdict | None, skipped: str, *, is_ddp: bool
) -> str:
    if finding.texts or finding.lacking:
        return "The ranks built different models."
    if skipped:
        return skipped
    if is_ddp and gradients is PartVerdict.DIFFERENT:
        return "The optimizer took a step with gradients that DDP had not averaged."
    if is_ddp and finding.is_rounding:
        return MAY_BE_ROUNDING
    if is_ddp:
        return (
            "DDP averages gradients, not weights. After DDP copied rank 0's weights, a rank "
            "skipped a step or changed its weights (look for load_state_dict and if rank == 0)."
        )
    if gradients is None:
        return (
            f"There are no gradients yet, and {NO_DDP}. Each rank drew its own initial weights. "
            "Set the same seed on all ranks, or wrap the model in DDP to copy rank 0's weights."
        )
    if gradients is PartVerdict.SAME:
        return (
            f"The gradients are the same now, but {NO_DDP}. Either the initial weights differed "
            "(different seeds), or a rank skipped a step."
        )
    return f"The gradients are not averaged, because {NO_DDP}. Each rank trains independently."


def _of_gradients(finding: Finding, *, is_ddp: bool) -> str:
    if finding.lacking:
        return (
            f"{spoken_ranks(finding.lacking).capitalize()} ran no backward pass, or called "
            "zero_grad() before the check."
        )
    if not is_ddp:
        return f"Each rank computed gradients from its own samples, because {NO_DDP}."
    if finding.is_rounding:
        return MAY_BE_ROUNDING
    return (
        "The last backward pass bypassed DDP (under no_sync() or with the inner module). Or a rank "
        "changed its gradients afterwards, for example by clipping with its own norm."
    )


def _of_buffers(finding: Finding, *, is_ddp: bool) -> str:
    if not _is_statistic(finding.tensor):
        return "Each rank updated its buffers separately, because DDP averages only gradients."
    if finding.verdict is PartVerdict.FACT:
        why = "By design, DDP sends rank 0's buffers to all ranks before each forward pass. "
        why += "Save and evaluate the model of rank 0"
    elif is_ddp:
        why = "DDP has broadcast_buffers=False, so it never sends rank 0's statistics"
    else:
        why = f"Rank 0's statistics are not sent, because {NO_DDP}"
    return f"Each rank computes BatchNorm's statistics from its own samples. {why}."


def _is_by_design(finding: Finding, held: Sequence[Held]) -> bool:
    """Return True if the part has only statistics that DDP sends before the next forward pass."""
    return finding.part is Part.BUFFERS and all(
        each.is_ddp
        and each.syncs_buffers
        and all(map(_is_statistic, each.parts.get(Part.BUFFERS, ())))
        for each in held
    )


def _is_statistic(buffer: str) -> bool:
    """Return True if a buffer's name is the name of one of BatchNorm's buffers."""
    return buffer.endswith(("running_mean", "running_var", "num_batches_tracked"))


def _skipped_step(replicas: Sequence[RankReplica]) -> str:
    """Return a message if ranks took different numbers of optimizer steps, otherwise ``""``."""
    for name in dict.fromkeys(name for each in replicas for name in each.num_steps):
        counts: dict[int, list[int]] = {}
        for each in replicas:
            counts.setdefault(each.num_steps.get(name, 0), []).append(each.rank)
        if len(counts) > 1:
            made = [f"{num} on {spoken_ranks(ranks)}" for num, ranks in sorted(counts.items())]
            return f"A rank skipped a step. Number of steps of {name}: {listed(made)}."
    return ""


# -- the result ----------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class ReplicaCheck(Shown):
    """The result of comparing replicas.  A notebook shows a table, a terminal shows text."""

    findings: tuple[Finding, ...]
    """The findings with their likely causes."""
    ranks: tuple[int, ...]
    """The ranks that were compared."""

    @property
    def is_same(self) -> bool:
        """True if all compared parts are the same, except parts that differ by design."""
        return not self._labels(PartVerdict.DIFFERENT)

    def _labels(self, verdict: PartVerdict) -> list[str]:
        return [each.label for each in self.findings if each.verdict is verdict]

    def sentence(self) -> str:
        """Return a sentence that says whether the replicas are the same."""
        where = spoken_ranks(self.ranks)
        if len(self._labels(PartVerdict.UNKNOWN)) == len(self.findings):
            return f"The replicas on {where} cannot be compared."
        if different := self._labels(PartVerdict.DIFFERENT):
            return f"The replicas on {where} differ: {listed(different)}."
        by_design = self._labels(PartVerdict.FACT)
        but = f"; {listed(by_design)} differ by design" if by_design else ""
        return f"The replicas are the same on {where}{but}."

    def table(self) -> Table:
        """Return a table with one row per part: result, first difference and likely cause."""
        rows = []
        for each in self.findings:
            colour = VERDICT_COLOURS.get(each.verdict, MUTED)
            state = Cell(
                text=each.verdict, dot=colour, is_hollow=each.verdict not in VERDICT_COLOURS
            )
            rows.append(
                table_row(each.label, state, _count(each), first_difference(each), each.cause)
            )
        return Table(
            caption=self.sentence(),
            columns=(
                Column(title="part"),
                Column(title="on all ranks"),
                Column(title="tensors", is_number=True),
                Column(title="first difference", is_prose=True),
                Column(title="likely cause", is_prose=True),
            ),
            rows=tuple(rows),
        )

    def text(self) -> str:
        """Return the result as text: a line for each part, with the difference below the line."""
        lines = [self.sentence(), ""]
        width = max((len(each.label) for each in self.findings), default=0)
        for each in self.findings:
            lines.append(f"{each.label:<{width}}  {each.verdict}  {_count(each)}".rstrip())
            lines += [f"    {text}" for text in (first_difference(each), each.cause) if text]
        return "\n".join(lines)


def _count(finding: Finding) -> str:
    num = f"{finding.num_tensors}" if finding.num_tensors else ""
    return f"{finding.num_different} of {num}" if finding.num_different else num


def first_difference(finding: Finding) -> str:
    """Return the first difference: its tensor, its ranks and its size."""
    parts = []
    if finding.groups:
        parts.append(f"{finding.tensor}: {_between(finding)}{_size(finding)}")
    if finding.num_sharded:
        what = counted(finding.num_sharded, "tensor")
        parts.append(f"{what} cannot be compared (sharded or without values)")
    return "; ".join(parts)


def _between(finding: Finding) -> str:
    """Return the groups of ranks that differ, e.g. ``"ranks 0,2 against rank 1"``."""
    if finding.lacking:
        return f"missing on {spoken_ranks(finding.lacking)}"
    if len(finding.groups) > MAX_SHOWN:
        return f"{len(finding.groups)} different values on {spoken_ranks(sum(finding.groups, ()))}"
    groups = [spoken_ranks(ranks) for ranks in finding.groups]
    if finding.texts:
        return listed([f"{text} on {who}" for text, who in zip(finding.texts, groups, strict=True)])
    return " against ".join(groups)


def _size(finding: Finding) -> str:
    """Return the number of measured elements that differ, and the largest difference."""
    if not finding.num_measured:
        return ""
    if finding.num_unequal == 0:
        return ", but all measured elements are equal"
    of = f"{finding.num_measured:,} element{'s' if finding.num_measured > 1 else ''}"
    if finding.num_measured < finding.num_elements:
        of += f" measured, of {finding.num_elements:,}"
    largest = "some values are NaN or infinite"
    if math.isfinite(finding.largest):
        largest = f"at most {finding.largest:.3g} apart; largest value {finding.scale:.3g}"
    return f", {finding.num_unequal:,} of {of}: {largest}"
