"""Does ``ddp`` in a comparison train as fast as a script written by hand, under ``torchrun``?

The same model, data, batches and optimizer; the script logs nothing, the comparison trains its
baseline first, records every step, draws and stores.
"""

import tempfile
import textwrap
from pathlib import Path

from benchmarks.kernel import kernel
from benchmarks.loop import rate_in, torchrun_rate
from benchmarks.measure import Figure, in_turns

NUM_EPOCHS = 20
ROUNDS = 7

TASK = textwrap.dedent(
    """
    import torch
    from torch import nn

    def model():
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10),
        )

    def data(split):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(4096, 1, 8, 8, generator=generator)
        return images, torch.randint(0, 10, (4096,), generator=generator)

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.01, momentum=0.9)
    """
)
COMPARE = textwrap.dedent(
    f"""
    import ddpnb
    result = ddpnb.compare(
        "ddp", source={TASK!r}, epochs={NUM_EPOCHS}, batch_size=256, name="bench"
    )
    print("\\nrate", result.to_frame().set_index("strategy").loc["ddp", "samples_per_second"])
    """
).lstrip()

SCRIPT = TASK + textwrap.dedent(
    f"""
    import time
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = DistributedDataParallel(model())
    sgd = optimizer(net.parameters())
    images, targets = data("train")

    def epoch(number):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(number))
        for batch in order.split(256):
            mine = batch[rank::world_size]
            sgd.zero_grad()
            nn.functional.cross_entropy(net(images[mine]), targets[mine]).backward()
            sgd.step()

    epoch(0)
    dist.barrier()
    began = time.perf_counter()
    for number in range({NUM_EPOCHS}):
        epoch(number)
    dist.barrier()
    if rank == 0:
        print("rate", {NUM_EPOCHS} * len(images) / (time.perf_counter() - began), flush=True)
    dist.destroy_process_group()
    """
)


def measure() -> list[Figure]:
    with kernel() as running, tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        running.run("%load_ext ddpnb\n%ddp_start -n 2")
        ours, theirs = in_turns(
            lambda: rate_in(running.run(COMPARE)), lambda: torchrun_rate(script), ROUNDS
        )
        running.run("%ddp_stop")
    return [
        Figure(
            name="ddp in %%ddp_compare against a script by hand under torchrun, 2 ranks",
            unit="samples/s",
            ours=ours,
            theirs=theirs,
            limit=">= 0.98",
        )
    ]
