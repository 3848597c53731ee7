"""The trainings of several benchmarks: in a cell, in a comparison and in a script."""

import re
import textwrap

NUM_EPOCHS = 12

LOOP = textwrap.dedent(
    """
    import time
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(1024, 10),
    )
    net = DistributedDataParallel(net)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    images, targets = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))

    def steps(num):
        for _ in range(num):
            sgd.zero_grad()
            nn.functional.cross_entropy(net(images), targets).backward()
            sgd.step()

    steps(10)
    dist.barrier()
    began = time.perf_counter()
    steps(30)
    dist.barrier()
    rate = 30 * 64 * dist.get_world_size() / (time.perf_counter() - began)
    if dist.get_rank() == 0:
        print("rate", rate, flush=True)
    """
)
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
        {{strategies}}, source={TASK!r}, epochs={NUM_EPOCHS}, batch_size=256, name="bench"
    )
    print("\\nrate", result.runs().set_index("strategy").loc["ddp", "samples_per_second"])
    """
).lstrip()

SCRIPT = TASK + textwrap.dedent(
    f"""
    import time
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)  # as in ddpnb, and in torchrun with more than one process
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = DistributedDataParallel(model()) if STRATEGY == "ddp" else model()
    sgd = optimizer(net.parameters())
    images, targets = data("train")

    def epoch(number):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(number))
        for step, batch in enumerate(order.split(256)):
            mine = batch[rank::world_size]
            sgd.zero_grad()
            nn.functional.cross_entropy(net(images[mine]), targets[mine]).backward()
            sgd.step()
            if STRATEGY == "local-sgd" and step % 8 == 7:
                for parameter in net.parameters():
                    dist.all_reduce(parameter.data)
                    parameter.data /= world_size

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
BY_HAND = {name: f"STRATEGY = {name!r}\n{SCRIPT}" for name in ("single", "ddp", "local-sgd")}
"""A script for each strategy. It expects a process group; ``single`` expects one process."""


def rate_in(text: str) -> float:
    return float(re.findall(r"rate ([\d.]+)", text)[-1])
