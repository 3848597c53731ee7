"""Every event of a rank arrives once and in order, if messages fail at any positions."""

import random
import time

import numpy as np
import pytest

from ddpnb.protocol.messages import StepEvent
from ddpnb.rank import publisher as module
from ddpnb.rank.publisher import NUM_LAST_ATTEMPTS, Publisher
from ddpnb.results.rows import EVENT


@pytest.mark.parametrize("seed", range(12))
def test_events_of_failed_messages_arrive_once_and_in_order(monkeypatch, seed):
    chance, arrived, failures = random.Random(seed), [], []
    fails = [chance.random() < 0.5 for _ in range(8)] if seed > 7 else [n == seed for n in range(8)]

    def publish_data(data):
        if fails and fails.pop(0):
            failures.append(OSError("the socket is full"))
            raise failures[-1]
        (batch,) = data.values()
        arrived.append((batch.sequence, np.frombuffer(batch.rows, EVENT)["step"].tolist()))

    monkeypatch.setattr(module, "publish_data", publish_data)
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.001)
    publisher, num = Publisher(rank=0, run_id="run"), 60
    for step in range(num):
        publisher.publish(StepEvent(step=step, num_samples=1))
        time.sleep(0.001 * chance.random())
    fails = fails[: NUM_LAST_ATTEMPTS - 1]  # the last attempt succeeds
    publisher.close()
    assert [step for _, steps in arrived for step in steps] == list(range(num))
    assert [sequence for sequence, _ in arrived] == list(range(len(arrived)))
    assert seed > 2 or failures


def test_events_that_cannot_be_sent_raise_at_the_end(monkeypatch):
    def publish_data(_):
        raise OSError("the socket is closed")

    monkeypatch.setattr(module, "publish_data", publish_data)
    publisher = Publisher(rank=0, run_id="run")
    publisher.publish(StepEvent(step=0, num_samples=1))
    with pytest.raises(OSError, match="closed"):
        publisher.close()
    publisher.close()
