"""What a user can choose about a cell, or a script, that runs on ranks (kernel)."""

from dataclasses import dataclass

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.options import check_options, option


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOptions:
    """The options of ``%%ddp`` and ``%ddp_run``."""

    ranks: str | None = option(
        None, "--ranks", kind=str, example="0,2-3", about="those that run it; by default all"
    )
    wait: bool = option(True, "--no-wait", about="return at once; output follows as it arrives")
    name: str = option("", "--name", example="NAME", about="the run that ddpnb.log in it adds to")
    timeout: float | None = option(
        None,
        "--timeout",
        kind=float,
        above=0,
        example="SECONDS",
        about="interrupt the ranks after this time",
    )
    check: bool = option(
        False, "--check", about="compare the exact shapes of collectives across the ranks too; slow"
    )
    debug: int | None = option(
        None,
        "--debug",
        kind=int,
        example="RANK",
        about="stop this rank at breakpoint(), with the notebook's prompt",
    )
    trace: bool = option(
        False, "--trace", about="record every collective and message, and draw the time line"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.debug is not None and not self.wait:
            raise UserError("--debug needs the notebook's prompt: leave out --no-wait.")
