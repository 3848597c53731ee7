"""What the user compiles is compiled off the clock."""

import pytest

from ddpnb.protocol.messages import NO_PARTS
from tests.rank.runs import marks_of, spec_of, steps_of, train_job
from tests.rank.sources import CELL, STEP

SECONDS = 1.0
"""How long each compilation takes, at least: longer than all steps of a run together."""

SLOWLY = f"""
import time
def slowly(module, inputs):
    time.sleep({SECONDS})
    return module.forward
"""
AROUND_STEP = CELL + SLOWLY + STEP.replace("def", "@torch.compile(backend=slowly)\ndef")
AROUND_MODEL = (
    CELL + SLOWLY + "plain = model\ndef model(): return torch.compile(plain(), backend=slowly)\n"
)


@pytest.mark.parametrize("source", [AROUND_STEP, AROUND_MODEL], ids=["step", "model"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "async"])
def test_every_size_of_batch_is_compiled_before_the_clock_starts(fresh_ranks, strategy, source):
    """Of 33 samples two workers get 17 and 16, and of the last 2 one each."""
    spec = spec_of(strategy, source=source, batch_size=33)
    for result in fresh_ranks(2).call(train_job, spec)[: 1 if strategy == "single" else 2]:
        assert marks_of(result) == []
        assert result[0].seconds < SECONDS


@pytest.mark.parametrize("strategy", ["single", "ddp", "async"])
def test_a_step_in_which_something_is_compiled_counts_no_time(fresh_ranks, strategy):
    spec = spec_of(strategy, source=AROUND_STEP, num_warmup_steps=0, num_epochs=10)
    results = [each for each in fresh_ranks(2).call(train_job, spec) if each[0].num_steps]
    for result in results:
        uncounted = [step for step in steps_of(result) if step.parts == NO_PARTS]
        assert len(uncounted) == len(marks_of(result)) >= 1
        if strategy != "async":  # where one may wait for the other at the end
            assert result[0].seconds < SECONDS
