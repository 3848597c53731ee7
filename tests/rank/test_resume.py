"""What a run can be resumed from, and what is refused before anything trains."""

import os

import pytest
import torch

from ddpnb.protocol.errors import UserError
from ddpnb.rank.training import loop
from ddpnb.rank.training.checkpoint import CheckpointPart
from tests.rank.ranks import make_state
from tests.rank.test_checkpoint import PER_EPOCH, losses, spec_of
from tests.rank.test_options import CELL, train_job


def refused(tmp_path, match: str, *, num_ranks=2, **changes):
    spec = spec_of("ddp", tmp_path, run_id="new", resume="old", **changes)
    with pytest.raises(UserError, match=match) as caught:
        loop.validate(spec, state=make_state(0, num_ranks), namespace={})
    assert "\n" not in str(caught.value)


def test_what_cannot_be_resumed_is_one_sentence_before_anything_trains(ranks, tmp_path):
    refused(tmp_path, "no complete checkpoint of the run to resume")
    ranks(2).call(train_job, spec_of("ddp", tmp_path))
    refused(
        tmp_path,
        "was trained for 3 epochs already: give more with --epochs".replace(
            "was trained", "has been trained"
        ),
    )
    refused(tmp_path, "--batch-size 32, not 40: give the same", num_epochs=9, batch_size=40)
    refused(tmp_path, "--seed 0, not 1: give the same", num_epochs=9, seed=1)
    refused(tmp_path, "--lr-warmup 0, not 1: give", num_epochs=9, num_lr_warmup_epochs=1)
    refused(tmp_path, "was trained by 2 ranks, not 3", num_epochs=9, num_ranks=3)
    for path in (tmp_path / "old").glob("step-*/rank-0*"):
        path.write_bytes(b"no such thing")
    refused(tmp_path, "cannot be read", num_epochs=9)


ADAM = f"{CELL}\ndef optimizer(params): return torch.optim.Adam(params)"
IN_GROUPS = (
    f"{CELL}\ndef optimizer(params):\n"
    "    return torch.optim.SGD([{'params': params[:2]}, {'params': params[2:]}], lr=0.05)"
)


def test_another_optimizer_or_task_is_one_sentence_before_anything_trains(ranks, tmp_path):
    ranks(2).call(train_job, spec_of("ddp", tmp_path, momentum=0.0))
    refused(tmp_path, "with --momentum 0, not 0.9: give the same", num_epochs=9)
    sentence = r"was trained with SGD, not Adam: let optimizer\(params\) return the same"
    refused(tmp_path, sentence, num_epochs=9, source=ADAM, momentum=0.0)
    refused(tmp_path, "with SGD, not SGD in 2 groups", num_epochs=9, source=IN_GROUPS, momentum=0.0)
    refused(
        tmp_path,
        "on a cell's own model, not on digits: train",
        num_epochs=9,
        momentum=0.0,
        task="digits",
    )
    for path in (tmp_path / "old").glob("step-*/rank-*"):  # as older versions wrote them
        state = torch.load(path, weights_only=True)
        state["spec"] = {name: state["spec"][name] for name in ("strategy", "batch_size", "seed")}
        torch.save(state, path)
    ranks(2).call(train_job, spec_of("ddp", tmp_path, run_id="new", resume="old", num_epochs=4))


LOOKAHEAD = f"""
{CELL}
class Lookahead:
    '''Every third step goes back halfway to where it was three steps ago.'''
    def setup(self, replica):
        self.replica = replica
        self.optimizer = replica.optimizer(replica.parameters)
        self.slow = [p.detach().clone() for p in replica.parameters]
        self.num_steps = 0

    def step(self, batch):
        loss = self.replica.compute_gradients(batch, weight=batch.weight)
        for parameter in self.replica.parameters:
            torch.distributed.all_reduce(parameter.grad)
        self.replica.update(self.optimizer)
        self.num_steps += 1
        if self.num_steps % 3 == 0:
            with torch.no_grad():
                for slow, parameter in zip(self.slow, self.replica.parameters):
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)
        return loss

    def finish(self):
        return self.replica.model

    def save(self):
        return {{"slow": self.slow, "num_steps": self.num_steps}}

    def load(self, state):
        self.slow, self.num_steps = state["slow"], state["num_steps"]
"""
FORGETFUL = LOOKAHEAD.replace("def load", "def forget")


@pytest.mark.parametrize(("source", "is_equal"), [(LOOKAHEAD, True), (FORGETFUL, False)])
def test_a_strategy_of_ones_own_goes_on_from_what_it_saved(ranks, tmp_path, source, is_equal):
    def trained(**changes):
        return ranks(2).call(train_job, spec_of("Lookahead", tmp_path, source=source, **changes))

    whole = trained(run_id="whole")
    trained(num_epochs=8 / PER_EPOCH)  # 8 steps: in the midst of three
    resumed = trained(run_id="new", resume="old")
    for mine, theirs in zip(resumed, whole, strict=True):
        assert (losses(mine) == pytest.approx(losses(theirs)[8:], abs=1e-6)) is is_equal


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


def test_nothing_in_a_checkpoint_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = CheckpointPart(folder=tmp_path / "old", part=0, num_parts=2)
    own.path(7).parent.mkdir(parents=True)
    for part in range(2):
        torch.save({"step": Trap()}, own.path(7).with_name(own.name(part)))
    refused(tmp_path, "cannot be read")
    assert not (tmp_path / "trapped").exists()
