"""Does a strategy report the bytes of its formula, and those that torch recorded?"""

import pytest

from ddpnb.rank.meter import Traffic
from tests.rank.fit import Problem, by_strategy

PROBLEM = Problem(num_epochs=2)
NUM_STEPS = 14
S = 4 * (6 * 16 + 16 + 16 * 3 + 3)
"""Bytes of the parameters of PROBLEM's model: float32."""
REDUCED = 4 * S // 3
"""What each of three ranks sends in an all-reduce."""


SENT = {
    ("ddp-by-hand", 3): [{REDUCED}] * 3,
    ("ddp-overlap-by-hand", 3): [{REDUCED}] * 3,
    ("central", 4): [{2 * S}, {S}, {S}, {S}],  # gloo passes a broadcast on along a tree
    ("dp", 3): [{2 * S}, set(), set()],
    ("ddp-shm", 1): [{0}],
    ("zero", 1): [{0}],
    ("fsdp", 1): [{0}],
    ("async", 2): [{S}, {S}],
    ("hogwild", 2): [{S}, {S}],
    ("no-comm", 2): [{0}, {0}],
    ("gossip", 3): [{S, 0}] * 3,
    ("local-sgd:every=7", 2): [{S, 0}] * 2,
    ("diloco:every=7", 2): [{S, 0}] * 2,
}
"""Bytes that each rank may send in a step."""


TOGETHER = {
    "ddp": 3 * REDUCED,
    "ddp-shm": 3 * S,
    "ring-by-hand": 4 * S,
    "zero": 3 * REDUCED + 2 * S,
}
"""Bytes that three ranks together send in a step."""


def traffic(ranks, word: str, num_ranks: int) -> list[list[Traffic]]:
    """Return what each rank exchanges in each step."""
    fits = ranks(num_ranks).call(by_strategy, word, PROBLEM)
    return [[report.traffic for report in fit.reports] for fit in fits]


@pytest.mark.parametrize(("word", "num_ranks"), SENT)
def test_each_rank_sends_the_bytes_of_its_formula(ranks, word, num_ranks):
    found = traffic(ranks, word, num_ranks)
    sent = [[step.sent for step in each] for each in found]
    assert [set(each) for each in sent] == SENT[word, num_ranks]
    if word not in ("async", "hogwild"):
        assert sum(step.received for each in found for step in each) == sum(map(sum, sent))
    if "every=7" in word:
        assert sent[0] == [S if (step + 1) % 7 == 0 else 0 for step in range(NUM_STEPS)]
    if word == "gossip":  # of an odd number one rests
        assert {sum(step) for step in zip(*sent, strict=True)} == {2 * S}


@pytest.mark.parametrize("word", TOGETHER)
def test_ranks_together_send_the_bytes_of_their_formula(ranks, word):
    steps = zip(*traffic(ranks, word, 3), strict=True)
    first, second, *others = (sum(each.sent for each in step) for step in steps)
    assert {first, *others} == {TOGETHER[word]}
    assert second - first in (0, 3 * 16)  # DDP also broadcasts the order of its buckets
