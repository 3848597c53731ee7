"""The held-out curve has the right models at the right moments, and does not slow the run."""

import time
from unittest.mock import patch

import pytest

from ddpnb.protocol.messages import Evaluating
from ddpnb.rank.training import snapshots
from tests.cells import CELL, WITH_DROPOUT
from tests.rank.runs import ASYNCHRONOUS, FEATURED, losses, spec_of, train_job


@pytest.mark.parametrize("strategy", [*FEATURED, "local-sgd"])
def test_a_curve_has_about_ten_points_on_rank_0(ranks, strategy):
    (first, _), *others = ranks(2).call(train_job, spec_of(strategy))
    assert not any(report.evaluations for report, _ in others)
    found = first.evaluations
    samples, seconds = [e.num_samples for e in found], [e.seconds for e in found]
    assert samples == sorted(set(samples))
    assert seconds == sorted(seconds)
    assert first.num_held_out == 50
    if strategy in ASYNCHRONOUS:  # rank 0 may have missed some points
        assert 1 <= len(found) <= 10
        assert 0 < samples[-1] <= 600
    else:
        assert samples == [64, 128, 192, 232, 296, 360, 400, 464, 528, 592]
        assert seconds[-1] <= first.seconds
    assert found[-1].accuracy > 0.6
    assert abs(found[-1].loss - first.held_out_loss) < 0.2


@pytest.mark.parametrize(
    ("strategy", "source"),
    [
        *((each, CELL) for each in ("dp", "ddp", "fsdp", "diloco:every=7", "gossip")),
        ("local-sgd:every=5", CELL.replace("nn.ReLU()", "*2 * [nn.Linear(16, 16)], nn.ReLU()")),
    ],
)
def test_a_point_is_the_model_that_a_run_would_end_with_there(ranks, strategy, source):
    longer = spec_of(strategy, source=source, num_epochs=2, eval_every=1)
    (at_one_epoch,) = ranks(2).call(train_job, longer)[0][0].evaluations
    shorter = ranks(2).call(train_job, spec_of(strategy, source=source, num_epochs=1))[0][0]
    assert at_one_epoch.num_samples == 200
    assert at_one_epoch.loss == pytest.approx(shorter.held_out_loss, abs=1e-5)
    assert at_one_epoch.accuracy == pytest.approx(shorter.held_out_accuracy)


def test_so_many_samples_are_judged_at_so_many_moments_and_that_is_announced(ranks):
    spec = spec_of("ddp", num_points=3, eval_samples=30)
    (report, events), *_ = ranks(2).call(train_job, spec)
    assert report.num_held_out == 30
    assert len(report.evaluations) == 2
    told = [event for event in events if isinstance(event, Evaluating)]
    assert [(each.num_done, each.num_all) for each in told] == [(n, 4) for n in range(4)]
    assert [each.seconds for each in told] == sorted(each.seconds for each in told)


def test_a_curve_changes_nothing_that_is_trained(ranks):
    with_it, without = (
        ranks(2).call(train_job, spec_of("local-sgd", source=WITH_DROPOUT, eval_every=every))[0]
        for every in (0.15, 0.0)
    )
    assert len(with_it[0].evaluations) == 20
    assert without[0].evaluations == ()
    assert losses(with_it) == losses(without)
    assert with_it[0].held_out_loss == without[0].held_out_loss


def slow_job(state, folder, spec):
    copy_state = snapshots.copy_state
    with patch.object(snapshots, "copy_state", lambda given: time.sleep(1) or copy_state(given)):
        return train_job(state, folder, spec)


def test_copies_are_off_the_clock_of_all_ranks(ranks):
    results = ranks(2).call(slow_job, spec_of("ddp", eval_every=1, num_epochs=2))
    assert len(results[0][0].evaluations) == 1
    assert all(report.seconds < 1.0 for report, _ in results)
