"""Classes that communicate in unusual ways train with right numbers, or get one sentence."""

import pytest

from ddpnb.protocol.errors import UserError
from tests.cells import CELL
from tests.rank import runs
from tests.rank.ranks import RankFailedError
from tests.rank.runs import losses, steps_of, train_job

BASE = f"""{CELL}
import threading
import torch.distributed as dist

class Base:
    def setup(self, worker):
        self.worker, self.works, self.number = worker, [], 0
        self.optimizer = worker.optimizer(worker.parameters)
        self.x = torch.ones(5_000)

    def step(self, batch):
        self.number += 1
        loss = nn.functional.cross_entropy(self.worker.model(batch.tree[0]), batch.tree[1])
        self.worker.model.zero_grad()
        loss.backward()
        self.communicate()
        self.optimizer.step()
        return loss

    def finish(self):
        return self.worker.model
"""
CLASSES = {
    "Overlapped": """
    def communicate(self):  # waits in the next step, and never for the last call
        for work in self.works:
            work.wait()
        self.works = [dist.all_reduce(self.x, async_op=True) for _ in range(2)]
    """,
    "Forgets": """
    def communicate(self):
        dist.all_reduce(self.x, async_op=True)
        dist.barrier()
    """,
    "Threaded": """
    def communicate(self):
        thread = threading.Thread(target=dist.all_reduce, args=(self.x,))
        thread.start()
        thread.join()
    """,
    "Some": """
    def communicate(self):
        if not hasattr(self, "pair"):
            self.pair = dist.new_group([0, 1])
        if self.worker.rank < 2:
            dist.all_reduce(self.x, group=self.pair)
    """,
    "Overlapping": """
    def communicate(self):
        num, rank = self.worker.world_size, self.worker.rank
        if not hasattr(self, "groups"):
            places = [{n, (n + 1) % num, (n + 3) % num} for n in range(num)]
            self.groups = [(sorted(each), dist.new_group(sorted(each))) for each in places]
        for number, (ranks, group) in enumerate(self.groups):
            if rank in ranks:
                size = 1000 * (1 + (self.number + number) % 3)
                self.works.append(dist.all_reduce(self.x[:size], group=group, async_op=True))
        for work in self.works[:: -1 if self.number % 2 else 1]:
            work.wait()
        self.works = []
        dist.all_reduce(self.x)
    """,
    "Rare": """
    def communicate(self):
        if self.number % 6 == 0:
            dist.all_reduce(self.x)
    """,
}
SOURCE = BASE + "".join(f"\nclass {name}(Base):{body}" for name, body in CLASSES.items())
EMULATED = {"compute": "1ms/sample,2ms", "link": "10Mbit,1ms"}


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("is_emulated", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_an_unusual_class_trains_and_its_times_add_up(ranks, name, is_emulated, num_ranks):
    given = {"devices": str(num_ranks), **EMULATED} if is_emulated else {}
    spec = runs.spec_of(name, source=SOURCE, num_epochs=2, **given)
    if name == "Threaded" and is_emulated:
        with pytest.raises(RankFailedError) as caught:
            ranks(num_ranks).call(train_job, spec)
        assert isinstance(caught.value.cause, UserError)
        assert "remove --devices and --link" in str(caught.value.cause)
        return
    results = ranks(num_ranks).call(train_job, spec)
    assert all(losses(result) for result in results)
    for result in results:
        begun = 0.0
        for step in steps_of(result):
            spent = sum(step.parts) - step.parts.hidden
            assert min(step.parts) >= 0
            assert step.parts.backward > 0
            assert step.seconds - begun == pytest.approx(spent)
            begun = step.seconds
    if is_emulated:  # every rank computes the same end of each exchange
        again = ranks(num_ranks).call(train_job, spec)
        assert list(map(steps_of, again)) == list(map(steps_of, results))
        if name in ("Forgets", "Overlapping"):  # all ranks meet at the end of a step
            ends = [[step.seconds for step in steps_of(result)] for result in results]
            assert all(each == pytest.approx(ends[0]) for each in ends)
