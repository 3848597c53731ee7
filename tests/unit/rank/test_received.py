"""What came from the notebook can be replaced by it, and is freed when the user deletes it."""

import sys
from typing import Any

import pytest

from ddpnb.protocol.variables import LARGE_BYTES, dump, in_message
from ddpnb.rank.variables import Received, give

LARGE = LARGE_BYTES + 1


def push(received: Received, namespace: dict[str, Any], **variables: Any) -> None:
    received.take(in_message(dump(variables, for_ranks=True)), namespace)


@pytest.mark.parametrize("kind", [str, bytes])
def test_a_large_text_is_held_by_its_name_alone(kind: type):
    received, namespace = Received(), {}
    push(received, namespace, text=kind(b"x" * LARGE, *(["ascii"] if kind is str else [])))
    assert len(namespace["text"]) == LARGE
    num_references = sys.getrefcount(namespace["text"])
    assert num_references == 2  # the name's, and that of the call
    del namespace["text"]
    push(received, namespace, other=1)
    assert namespace == {"other": 1}


def test_a_value_that_nobody_waits_for_is_not_evaluated(tmp_path):
    trace = tmp_path / "trace"
    with pytest.raises(TimeoutError, match="does not wait for this value any longer"):
        give(
            f"open({str(trace)!r}, 'w')",
            {},
            path=str(tmp_path / "gone"),
            classes=(),
            num_copies=1,
        )
    assert not trace.exists()
