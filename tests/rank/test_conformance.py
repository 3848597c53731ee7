"""Every strategy equals plain SGD in all cases in which it should compute plain SGD."""

import pytest
import torch
from torch import nn

from ddpnb.protocol.catalogue import STRATEGIES
from tests.rank.fit import Fit, Problem, by_hand, by_strategy, distance

SYNCHRONOUS = [
    "single",
    "dp",
    "ddp",
    "ddp-by-hand",
    "ddp-overlap-by-hand",
    "ddp-overlap-by-hand:bucket_mb=0.0002",
    "ring-by-hand",
    "central",
    "zero",
    "fsdp",
]
PLAIN_OUTER_STEP = "diloco:outer_lr=1,outer_momentum=0"
"""With these options DiLoCo's outer optimizer leaves the weights of a single rank unchanged."""
PLAIN_ALONE = [PLAIN_OUTER_STEP if name == "diloco" else name for name in STRATEGIES]


@pytest.mark.parametrize("name", STRATEGIES)
def test_options_have_the_defaults_of_the_constructor_and_close_needs_no_setup(name):
    make, options = STRATEGIES[name].load(), STRATEGIES[name].options
    plain, given = make(), make(**{key: option.default for key, option in options.items()})
    differ = [key for key in vars(plain) if vars(plain)[key] != vars(given)[key]]
    assert not differ
    plain.close()


def plainly(state, folder, problem: Problem) -> Fit:
    """Fit by plain torch on a rank, so that sums have the same order as in the strategies."""
    return by_hand(problem)


@pytest.mark.parametrize("word", PLAIN_ALONE)
def test_on_one_rank_it_is_plain_sgd(ranks, word):
    (fit,) = ranks(1).call(by_strategy, word, Problem())
    (reference,) = ranks(1).call(plainly, Problem())
    if word != PLAIN_OUTER_STEP:  # the same sums in the same order
        assert distance(fit, reference) == 0
    assert distance(fit, reference) < 1e-5
    assert losses(fit) == pytest.approx(losses(reference), abs=1e-5)
    if word not in ("async", "hogwild"):
        assert {report.num_bytes_sent for report in fit.reports} == {0}
    assert list(ranks(1).folder.iterdir()) == []


# Three ranks share 10 samples as 4, 3 and 3. In the last batch each rank gets one sample.
# Every rank always gets a shard (see BatchSchedule), so torch's Join is not needed here.
@pytest.mark.parametrize("num_ranks", [3, 4, 8])
@pytest.mark.parametrize("name", [*SYNCHRONOUS, "async:bound=0"])
def test_on_several_ranks_it_is_one_process_with_the_whole_batch(ranks, name, num_ranks):
    if num_ranks == 3:
        problem = Problem(optimizer="sgd", model="frozen" if name == "zero" else "mixed")
    else:
        problem = Problem(optimizer="adam", accumulate=2, model="frozen", clip=0.3, num_epochs=1)
    fits = took_part(ranks(num_ranks).call(by_strategy, name, problem))
    reference = by_hand(problem, num_ranks)
    assert all(distance(fit, reference) < 1e-5 for fit in fits)
    assert num_samples(fits) == num_samples([reference])


S = 4 * (6 * 16 + 16 + 16 * 3 + 3)
"""Bytes of the float32 parameters of a ``Problem``'s model."""
FLAGS = 4 * 4
"""Bytes of one flag for each parameter."""
SENT = {
    "single": lambda n: 0,
    "dp": lambda n: S,
    "ddp": lambda n: 2 * (n - 1) * S,
    "ddp-by-hand": lambda n: 2 * (n - 1) * (S + FLAGS),
    "ddp-overlap-by-hand": lambda n: 2 * (n - 1) * (S + FLAGS),
    "ring-by-hand": lambda n: 2 * (n - 1) * (S + FLAGS),
    "central": lambda n: 2 * (n - 1) * (S + FLAGS),
    "async": lambda n: n * S,
    "async:compensate=on": lambda n: n * S,
    "hogwild": lambda n: n * S,
    "local-sgd:every=7": lambda n: 2 * (n - 1) * S,
    "diloco:every=7": lambda n: 2 * (n - 1) * S,
    "zero": lambda n: 3 * (n - 1) * S,
    "fsdp": None,  # see test_sharded.py
    "gossip": None,  # see below
    "no-comm": lambda n: 0,
}
"""Bytes that n ranks together send in a step with communication, by the strategies' docstrings."""


def test_the_bytes_of_every_strategy_are_known():
    assert {word.partition(":")[0] for word in SENT} == set(STRATEGIES)


@pytest.mark.parametrize("num_ranks", [2, 5, 8])
@pytest.mark.parametrize("word", SENT)
def test_ranks_agree_in_the_end_have_sent_what_is_known_and_leave_nothing(ranks, word, num_ranks):
    problem = Problem(num_epochs=1)
    fits = took_part(ranks(num_ranks).call(by_strategy, word, problem))
    assert all(distance(fit, fits[0]) == 0 for fit in fits)
    # each sample once, but the last batch has 4 of 64 samples, for at most 4 ranks
    assert num_samples(fits) == 60 + (4 // num_ranks) * num_ranks
    assert list(ranks(num_ranks).folder.iterdir()) == []
    sent = [[report.num_bytes_sent for report in fit.reports] for fit in fits]
    if word.partition(":")[0] in ("async", "hogwild"):
        assert {num_bytes for each in sent for num_bytes in each} == {S}
        return
    first, second, *others = map(sum, zip(*sent, strict=True))
    if word == "gossip":  # an idle rank has no partner
        assert {first, second, *others} == {S * (num_ranks - num_ranks % 2)}
        return
    expected = SENT[word] and pytest.approx(SENT[word](num_ranks), abs=4 * num_ranks)
    is_due = [k % 7 == 6 or "every=7" not in word for k in range(len(sent[0]))]
    for due, found in zip(is_due, (first, second, *others), strict=True):
        assert expected in (None, found) if due else found == 0


class Experts(nn.Module):
    """A model that uses one of two experts for each sample, and has a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))
        self.unused = nn.Linear(6, 3)

    def forward(self, inputs):
        chosen = (inputs[:, 0] > 1).long()
        outputs = [
            self.experts[number](each) for number, each in zip(chosen.tolist(), inputs, strict=True)
        ]
        return torch.stack(outputs)


@pytest.mark.parametrize(
    "name",
    [
        *("dp", "ddp:find_unused_parameters=on", "ddp-by-hand", "ring-by-hand", "central"),
        *("ddp-overlap-by-hand", "ddp-overlap-by-hand:bucket_mb=25"),
    ],
)
def test_parameters_without_a_gradient_on_any_rank_are_not_updated(ranks, name):
    """Weight decay and Adam's momentum would change these parameters."""
    problem = Problem(model=Experts, optimizer="adamw", num_epochs=1)
    fits = took_part(ranks(3).call(by_strategy, name, problem))
    reference = by_hand(problem, 3)
    assert all(distance(fit, reference) < 1e-5 for fit in fits)
    assert torch.equal(reference.parameters[-1], problem.build().unused.bias)


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_compressed_gradients_are_weighted_as_plain_ones(ranks, hook):
    """With shards of 4, 3 and 3 samples, an average without weights would differ much more."""
    problem = Problem(optimizer="sgd", num_epochs=1)
    start = Problem(optimizer="sgd", num_epochs=0.01, learning_rate=0.0)
    fits = ranks(3).call(by_strategy, f"ddp:hook={hook}", problem)
    assert all(distance(fit, fits[0]) == 0 for fit in fits)
    reference = by_hand(problem, 3)
    moved = distance(by_hand(start, 3), reference)
    off = {"fp16": 2e-3, "bf16": 2e-2}[hook]
    assert 0 < distance(fits[0], reference) < off * moved


def took_part(fits: list[Fit]) -> list[Fit]:
    return [fit for fit in fits if fit.reports]


def losses(fit: Fit) -> list[float]:
    return [report.loss.item() for report in fit.reports]


def num_samples(fits: list[Fit]) -> int:
    return sum(report.num_samples for fit in fits for report in fit.reports)
