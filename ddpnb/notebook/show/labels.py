"""Where do labels go so that none covers another?  (Notebook side.)"""

from collections.abc import Sequence


def spread_out(
    wanted: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0
) -> list[float]:
    """Return positions at least ``gap`` apart, each as near as can be to the one wanted.

    Neighbours that are too close form a block around the mean of what they want;
    blocks that touch are joined.  Order is kept.  If they cannot all lie between
    ``low`` and ``high``, they are packed evenly there.

    Args:
        wanted: positions, in any order.
        gap: least distance between two positions.
        low: least position.
        high: greatest position.
    """
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    blocks: list[list[int]] = []
    starts: list[float] = []
    for index in order:
        blocks.append([index])
        starts.append(_start(blocks[-1], wanted, gap, low, high))
        while len(blocks) > 1 and starts[-2] + gap * len(blocks[-2]) > starts[-1]:
            blocks[-2:] = [blocks[-2] + blocks[-1]]
            starts[-2:] = [_start(blocks[-1], wanted, gap, low, high)]
    placed = [0.0] * len(wanted)
    for block, start in zip(blocks, starts, strict=True):
        for offset, index in enumerate(block):
            placed[index] = start + offset * gap
    return placed


def _start(
    block: Sequence[int], wanted: Sequence[float], gap: float, low: float, high: float
) -> float:
    """Return where the block's first label goes, so that the block is near what it wants."""
    length = gap * (len(block) - 1)
    middle = sum(wanted[index] for index in block) / len(block)
    return min(max(middle - length / 2, low), max(high - length, low))
