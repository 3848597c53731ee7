"""What a user can choose about a cell, or a script, that runs on ranks (kernel)."""

from dataclasses import dataclass

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.options import check_options, option


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOptions:
    """The options of ``%%ddp`` and ``%ddp_run``."""

    ranks: str | None = option(None, "those that run it; by default all", example="0,2-3")
    wait: bool = option(True, "return at once; output follows as it arrives", flag="--no-wait")
    name: str = option("", "the run that ddpnb.log in it adds to", example="NAME")
    timeout: float | None = option(
        None, "interrupt the ranks after this time", above=0, example="SECONDS"
    )
    check: bool = option(
        False, "compare the exact shapes of collectives across the ranks too; slow"
    )
    debug: int | None = option(
        None,
        "stop this rank at breakpoint(), with the notebook's prompt",
        example="RANK",
    )
    trace: bool = option(False, "record every collective and message, and draw the time line")

    def __post_init__(self) -> None:
        check_options(self)
        if self.debug is not None and not self.wait:
            raise UserError("--debug needs the notebook's prompt: leave out --no-wait.")
