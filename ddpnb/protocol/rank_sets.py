"""Sets of ranks as users write them: ``0,2-3``.  (Kernel and ranks.)"""

from collections.abc import Collection, Iterable

from ddpnb.protocol.errors import UserError


def parse_ranks(text: str | None, world_size: int) -> tuple[int, ...]:
    """Parse a set of ranks such as ``"0,2-3"``; ``None`` means all.

    Raises:
        UserError: the text names no rank, or one that does not exist.
    """
    if text is None or text.strip() in ("", "all"):
        return tuple(range(world_size))
    ranks: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        try:
            ranks |= set(range(int(first), int(last or first) + 1))
        except ValueError:
            raise UserError(
                f"{text!r} does not name ranks: write numbers and ranges, such as 0,2-3."
            ) from None
    if not ranks:
        raise UserError(f"{text!r} names no rank: write the smaller number first, such as 0-3.")
    if missing := sorted(rank for rank in ranks if rank >= world_size):
        raise UserError(
            f"There is no rank {format_ranks(missing)}: the ranks are "
            f"{format_ranks(range(world_size))}."
        )
    return tuple(sorted(ranks))


def format_ranks(ranks: Iterable[int]) -> str:
    """Return a set of ranks in the short form: ``"0,2-3"``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)


def spoken_ranks(ranks: Collection[int]) -> str:
    """Return a set of ranks for a sentence: ``"rank 1"``, ``"ranks 0,2-3"``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"
