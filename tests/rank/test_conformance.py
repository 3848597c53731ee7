"""Does every strategy equal plain SGD wherever that is what it should compute?"""

import pytest
import torch

from ddpnb.protocol.catalogue import STRATEGIES
from tests.rank.fit import Fit, Problem, by_hand, by_strategy, distance

SYNCHRONOUS = [
    "single",
    "dp",
    "ddp",
    "ddp-shm",
    "ddp-by-hand",
    "ddp-overlap-by-hand",
    "ddp-overlap-by-hand:bucket_mb=0.0002",
    "ring-by-hand",
    "central",
    "zero",
    "fsdp",
]
PLAIN_OUTER_STEP = "diloco:outer_lr=1,outer_momentum=0"
"""DiLoCo's outer optimizer moves the weights even on one rank; so set, it does not."""
PLAIN_ALONE = [PLAIN_OUTER_STEP if name == "diloco" else name for name in STRATEGIES]


@pytest.mark.parametrize("name", STRATEGIES)
def test_options_have_the_defaults_of_the_constructor_and_close_needs_no_setup(name):
    make, options = STRATEGIES[name].load(), STRATEGIES[name].options
    plain, given = make(), make(**{key: option.default for key, option in options.items()})
    differ = [key for key in vars(plain) if vars(plain)[key] != vars(given)[key]]
    assert set(differ) <= {"_opened"}
    plain.close()


@pytest.mark.parametrize("word", PLAIN_ALONE)
def test_on_one_rank_it_is_plain_sgd(ranks, word):
    (fit,) = ranks(1).call(by_strategy, word, Problem())
    reference = by_hand(Problem())
    if word != PLAIN_OUTER_STEP:  # the same sums in the same order
        assert distance(fit, reference) == 0
    assert distance(fit, reference) < 1e-5
    assert losses(fit) == pytest.approx(losses(reference), abs=1e-5)
    assert list(ranks(1).folder.iterdir()) == []


@pytest.mark.parametrize("model", ["batchnorm", "frozen", "mixed"])
@pytest.mark.parametrize("word", ["dp", "ddp", "ddp-shm", "ddp-overlap-by-hand", "fsdp", "async"])
def test_on_one_rank_any_model_trains_as_in_plain_torch(ranks, word, model):
    problem = Problem(model=model, batch_size=16)
    (fit,) = ranks(1).call(by_strategy, word, problem)
    reference = by_hand(problem)
    assert distance(fit, reference) == 0
    for mine, theirs in zip(fit.buffers, reference.buffers, strict=True):
        torch.testing.assert_close(mine, theirs)


# 64 samples in batches of 10: shards of 4 and 3, and of 2 and 1 in the last batch of an epoch.
# No rank is ever without a shard (see BatchSchedule), so that torch's Join has nothing to do here.
@pytest.mark.parametrize(
    ("num_ranks", "problem"),
    [
        (3, Problem(optimizer="sgd", model="mixed")),
        (4, Problem(optimizer="adam", accumulate=2, model="frozen", clip=0.3)),
    ],
)
@pytest.mark.parametrize("name", [*SYNCHRONOUS, "async:bound=0"])
def test_on_several_ranks_it_is_one_process_with_the_whole_batch(ranks, name, num_ranks, problem):
    if (name, problem.model) == ("zero", "mixed"):
        pytest.skip("ZeroRedundancyOptimizer takes one type only")
    fits = took_part(ranks(num_ranks).call(by_strategy, name, problem))
    reference = by_hand(problem, num_ranks)
    assert all(distance(fit, reference) < 1e-5 for fit in fits)
    assert num_samples(fits) == num_samples([reference])


@pytest.mark.parametrize("name", [*STRATEGIES, "async:compensate=on"])
def test_all_ranks_agree_in_the_end_and_leave_nothing(ranks, name):
    fits = took_part(ranks(3).call(by_strategy, name, Problem()))
    assert all(distance(fit, fits[0]) == 0 for fit in fits)
    assert list(ranks(3).folder.iterdir()) == []


def took_part(fits: list[Fit]) -> list[Fit]:
    return [fit for fit in fits if fit.reports]


def losses(fit: Fit) -> list[float]:
    return [report.loss.item() for report in fit.reports]


def num_samples(fits: list[Fit]) -> int:
    return sum(report.num_samples for fit in fits for report in fit.reports)
