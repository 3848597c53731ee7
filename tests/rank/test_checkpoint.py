"""A training that ended early is resumed as if it had not ended."""

import os
import resource
import signal
import time

import pytest
import torch

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.messages import Mark, RunHeader, RunSpec, StepEvent
from ddpnb.rank.training import checkpoint
from ddpnb.rank.training.checkpoint import CheckpointPart, Checkpoints
from tests.rank.test_options import CELL, train_job

DROPOUT = CELL.replace("nn.ReLU(),", "nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2),")
PER_EPOCH = 7  # steps: 200 samples in batches of 32


def spec_of(strategy: str, folder, **changes) -> RunSpec:
    values = {"source": CELL, "num_epochs": 3, "batch_size": 32, "save_every": 1}
    values |= {"run_id": "old", "checkpoints": str(folder), "momentum": 0.9}
    return RunSpec(strategy=strategy, **values | changes)


def losses(result) -> list[float]:
    return [event.loss for event in result[1] if isinstance(event, StepEvent)]


def notes(result) -> tuple[str, ...]:
    return next(event.notes for event in result[1] if isinstance(event, RunHeader))


@pytest.mark.parametrize(
    ("strategy", "source"),
    [
        ("single", CELL),
        ("single", DROPOUT),
        ("ddp", CELL),
        ("ddp", DROPOUT),
        ("dp", CELL),  # whose replicas draw dropout's masks in no fixed order
        *((name, CELL) for name in ("ddp-shm", "ddp-by-hand", "ring-by-hand", "central")),
        ("ddp-overlap-by-hand", CELL),
        *((name, CELL) for name in ("zero", "fsdp", "no-comm", "local-sgd:every=1")),
        ("gossip:together=on", CELL),
        ("local-sgd:every=5", CELL),
        ("diloco:every=5", CELL),
    ],
)
def test_a_resumed_run_equals_one_that_never_stopped(ranks, tmp_path, strategy, source):
    choices = {"source": source, "num_lr_warmup_epochs": 2, "seed": 3}
    whole = ranks(2).call(train_job, spec_of(strategy, tmp_path, run_id="whole", **choices))
    ranks(2).call(train_job, spec_of(strategy, tmp_path, num_epochs=8 / PER_EPOCH, **choices))
    resumed = ranks(2).call(
        train_job, spec_of(strategy, tmp_path, run_id="new", resume="old", **choices)
    )
    for mine, theirs in zip(resumed, whole, strict=True):
        assert losses(mine) == pytest.approx(losses(theirs)[8:], abs=1e-6)
    assert resumed[0][0].held_out_loss == pytest.approx(whole[0][0].held_out_loss, abs=1e-6)
    header = next(event for event in resumed[0][1] if isinstance(event, RunHeader))
    before = header.num_samples_before
    assert f"Resumed from another run at {before} samples; time starts again at 0." in notes(
        resumed[0]
    )
    assert (before, header.num_samples) == (232, 368)
    model, other = (model_of(tmp_path / name) for name in ("new", "whole"))
    for name, value in model.items():
        torch.testing.assert_close(value, other[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_can_be_resumed(ranks, tmp_path, strategy):
    word = "easgd:every=2" if strategy == "easgd" else strategy  # a centre that moves soon enough
    first = ranks(2).call(train_job, spec_of(word, tmp_path, num_epochs=2))
    resumed = ranks(2).call(
        train_job, spec_of(word, tmp_path, run_id="new", resume="old", num_epochs=4)
    )
    assert losses(resumed[0])[0] < 0.9 * losses(first[0])[0]
    assert resumed[0][0].final_loss < first[0][0].final_loss
    is_exact = strategy not in ("async", "hogwild", "gossip", "easgd")
    assert any(" at about " in n for n in notes(resumed[0])) != is_exact


def test_powersgd_starts_afresh_when_a_run_is_resumed_and_says_so(ranks, tmp_path):
    word = "ddp:hook=powersgd"
    first = ranks(2).call(train_job, spec_of(word, tmp_path, num_epochs=1))
    again = ranks(2).call(train_job, spec_of(word, tmp_path, run_id="new", resume="old"))
    sent = [[e.num_bytes_sent for e in r[0][1] if isinstance(e, StepEvent)] for r in (first, again)]
    assert sent[0] == sent[1][:PER_EPOCH]  # the plain steps at first, too
    assert sent[0][0] > sent[0][-1]
    assert [any("starts afresh" in note for note in notes(r[0])) for r in (first, again)] == [0, 1]
    assert again[0][0].final_loss < first[0][0].final_loss


def test_an_asynchronous_server_gets_its_optimizers_state_back(ranks, tmp_path):
    whole = ranks(1).call(train_job, spec_of("async", tmp_path, run_id="whole"))[0]
    ranks(1).call(train_job, spec_of("async", tmp_path, num_epochs=1))
    resumed = ranks(1).call(train_job, spec_of("async", tmp_path, run_id="new", resume="old"))[0]
    # One worker alone is in step with its server: there it is exact.
    assert losses(resumed) == pytest.approx(losses(whole)[PER_EPOCH:], abs=1e-6)


def test_the_last_two_are_kept_and_the_model(ranks, tmp_path):
    ranks(2).call(train_job, spec_of("ddp", tmp_path, num_epochs=4))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")) == [
        "old/model.pt",
        "old/step-00000021/rank-0-of-2.pt",
        "old/step-00000021/rank-1-of-2.pt",
        "old/step-00000028/rank-0-of-2.pt",
        "old/step-00000028/rank-1-of-2.pt",
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_there_is_one_at_the_end_however_rare_they_are(ranks, tmp_path, strategy):
    ranks(2).call(train_job, spec_of(strategy, tmp_path, num_epochs=1, save_every=5))
    assert {path.parent.name for path in tmp_path.glob("old/*/*")} == {"step-00000007"}


def test_without_save_every_nothing_is_written(ranks, tmp_path):
    ranks(1).call(train_job, spec_of("ddp", tmp_path, save_every=0))
    assert list(tmp_path.iterdir()) == []


def torn_job(state, folder, part):
    """Write two checkpoints; be killed in the midst of writing the third."""
    kept = Checkpoints(part, every=1, warn=print)
    kept.after(1, lambda: {"step": 1})
    kept.after(2, lambda: {"step": 2})
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    kept.after(3, lambda: {"step": 3})


def test_a_kill_while_writing_leaves_the_one_before(fresh_ranks, tmp_path):
    part = CheckpointPart(folder=tmp_path, part=0, num_parts=1)
    (result,) = fresh_ranks(1).attempt(torn_job, part)
    assert "died" in str(result)
    assert list((tmp_path / "step-00000003").iterdir())  # it was at it
    assert checkpoint.last_step(part) == 2
    assert torch.load(part.path(2), weights_only=True) == {"step": 2}


def test_a_checkpoint_counts_when_all_its_parts_are_there(tmp_path):
    first, second = (CheckpointPart(folder=tmp_path, part=part, num_parts=2) for part in (0, 1))
    for part, steps in ((first, (5, 10)), (second, (5,))):
        for step in steps:
            Checkpoints(part, every=5, warn=print).after(step, lambda: {})
    assert checkpoint.last_step(first) == checkpoint.last_step(second) == 5


def test_ranks_that_drift_apart_leave_the_last_complete_ones(tmp_path):
    """One rank is far ahead of the other, which is killed: a complete checkpoint is left."""
    first, second = (CheckpointPart(folder=tmp_path, part=part, num_parts=2) for part in (0, 1))
    ahead, behind = (Checkpoints(part, every=5, warn=print) for part in (first, second))
    for step in (5, 10, 15, 20, 25):
        ahead.after(step, lambda: {})
    behind.after(5, lambda: {})
    assert checkpoint.last_step(first) == 5
    behind.after(10, lambda: {})
    behind.after(15, lambda: {})
    assert checkpoint.last_step(first) == 15
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {f"step-{step:08}" for step in (10, 15, 20, 25)}
    behind.after(20, lambda: {})
    behind.after(25, lambda: {})
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000020", "step-00000025"}


def limited_job(state, folder, spec):
    """Train where no file may grow beyond a few bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        return train_job(state, folder, spec)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_reported_once_and_does_not_stop_the_training(ranks, tmp_path):
    results = ranks(2).call(limited_job, spec_of("ddp", tmp_path))
    for report, events in results:
        assert report.num_steps == 3 * PER_EPOCH
        (mark,) = [event for event in events if isinstance(event, Mark)]
        assert mark.text == "no checkpoint: File too large"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def slow_job(state, folder, spec):
    """Train where one rank's disk takes 2 s for each file."""
    write = checkpoint.write

    def write_slowly(path, content):
        time.sleep(2.0 * (state.rank == 1))
        write(path, content)

    checkpoint.write = write_slowly
    try:
        return train_job(state, folder, spec)
    finally:
        checkpoint.write = write


def test_what_writing_takes_is_not_training_time(ranks, tmp_path):
    for report, events in ranks(2).call(slow_job, spec_of("ddp", tmp_path)):
        steps = [event for event in events if isinstance(event, StepEvent)]
        seconds = [event.seconds for event in steps]
        assert seconds == sorted(seconds)
        assert 0 < seconds[-1] <= report.seconds < 3.0, "6 s were spent on writing"
        parts = [event.parts for event in steps]
        assert sum(sum(part) - part.hidden for part in parts) == pytest.approx(seconds[-1])


def test_notes_say_whether_the_clock_runs_meanwhile(ranks, tmp_path):
    stands = ranks(2).call(train_job, spec_of("ddp", tmp_path, num_epochs=1))
    assert "The clock stands still while checkpoints are written." in notes(stands[0])
    runs = ranks(2).call(train_job, spec_of("async", tmp_path, num_epochs=1))
    assert "Rank 0 trains on nothing while it writes checkpoints; the others go on." in notes(
        runs[0]
    )


COUNTING = f"""
import time
{CELL}
class Counting(torch.optim.Optimizer):
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            count = self.state[parameter].setdefault("count", torch.zeros(()))
            count += 1
            parameter.data.fill_(float(count))
            time.sleep(0.005)

def optimizer(parameters):
    return Counting(parameters, {{"lr": 0.1}})
"""


def keep_all_job(state, folder, spec):
    """Train, and let every checkpoint stay."""
    before, checkpoint.NUM_KEPT = checkpoint.NUM_KEPT, 100
    try:
        return train_job(state, folder, spec)
    finally:
        checkpoint.NUM_KEPT = before


def test_an_asynchronous_server_is_copied_between_two_updates(ranks, tmp_path):
    spec = spec_of(
        "async", tmp_path, source=COUNTING, save_every=0.1, momentum=0.0, num_warmup_steps=0
    )
    ranks(2).call(keep_all_job, spec)
    paths = sorted(tmp_path.glob("old/step-*/rank-0-of-*.pt"))
    assert len(paths) >= 1
    for path in paths:
        state = torch.load(path, weights_only=True)["strategy"]
        held = {float(value) for tensor in state["model"].values() for value in tensor.flatten()}
        (optimizer,) = state["optimizers"]
        assert held == {float(each["count"]) for each in optimizer["state"].values()}
        assert len(held) == 1


def model_of(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def test_a_checkpoint_is_on_the_disk_with_its_name(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    part = CheckpointPart(folder=tmp_path / "run", part=0, num_parts=1)
    Checkpoints(part, every=1, warn=pytest.fail).after(1, dict)
    new = [part.path(1).parent, tmp_path / "run", tmp_path]
    assert synced[1:] == [str(folder) for folder in new]
