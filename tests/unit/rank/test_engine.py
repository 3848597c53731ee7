"""What a rank's control thread answers."""

from ddpnb.protocol.processes import RankCommand
from ddpnb.rank.engine import answer_to


def fail() -> None:
    raise ValueError("no such thing")


def test_a_command_that_fails_is_answered_with_the_failure():
    handlers = {RankCommand.STATUS: lambda: 3, RankCommand.STACK: fail}
    assert answer_to({"command": "status"}, handlers) == {"value": 3}
    assert answer_to({"command": "stack"}, handlers) == {"failure": "ValueError: no such thing"}
    assert "failure" in answer_to({"command": "unknown"}, handlers)
