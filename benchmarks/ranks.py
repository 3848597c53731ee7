"""Measures the costs of many ranks on one machine, with a new kernel for each number of ranks.

``python -m benchmarks ranks:nums=2+64`` measures only some numbers of ranks.
"""

import statistics
import textwrap
from typing import Any

from benchmarks.kernel import kernel
from benchmarks.measure import Figure

NUMS = (2, 8, 16, 32, 64)
PROMISES = {
    "time of an empty cell": "<= 0.15",
    "time to release the ranks that wait in a barrier that one rank skips": "<= 10",
}
"""The promised seconds at 64 ranks."""

STEPS = textwrap.dedent(
    """
    import contextlib, io, json, time
    import psutil
    from IPython import get_ipython

    shell = get_ipython()
    shell.run_line_magic("load_ext", "ddpnb")
    from ddpnb.session.errors import HangError
    taken = {{}}

    def processor_seconds():
        this = psutil.Process()
        total = 0.0
        for process in [this, *this.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:4])
        return total

    def timed(name, run, times=1, error=()):
        for _ in range(times):
            before, began = processor_seconds(), time.perf_counter()
            with contextlib.suppress(error):
                run()
            took = time.perf_counter() - began
            taken.setdefault(name, []).append([took, processor_seconds() - before])

    def cell(source):
        return lambda: shell.run_cell_magic("ddp", "", source)

    BARRIER = "import torch.distributed as dist\\nif rank: dist.barrier()"
    TRAINING = '''
    import torch
    from torch.nn.parallel import DistributedDataParallel
    net = DistributedDataParallel(torch.nn.Linear(64, 10))
    for step in range(10):
        net.zero_grad()
        net(torch.randn(8, 64)).sum().backward()
    '''

    timed("time of %ddp_start", lambda: shell.run_line_magic("ddp_start", "-n {num} --device cpu"))
    cell("pass")()
    timed("time of an empty cell", cell("pass"), 7)
    timed("time to print a line on each rank", cell("print(rank)"), 3)
    timed("time of the first 10 DDP steps on one layer, with torch's imports", cell(TRAINING))
    timed("time of 10 DDP steps on one layer", cell(TRAINING), 3)
    timed("time to release the ranks that wait in a barrier that one rank skips",
          cell(BARRIER), error=HangError)
    timed("time of the next cell, in a new group", cell("pass"))
    COMPARISON = "ddp --task digits --epochs 1 --no-baseline"
    timed("time of a comparison", lambda: shell.run_line_magic("ddp_compare", COMPARISON))
    RESTART = "time of %ddp_restart --ranks 1"
    timed(RESTART, lambda: shell.run_line_magic("ddp_restart", "--ranks 1"))
    began = time.perf_counter()  # no CPU time: the processes are gone afterwards
    shell.run_line_magic("ddp_stop", "")
    taken["time of %ddp_stop"] = [[time.perf_counter() - began, 0.0]]
    print()
    print(json.dumps(taken))
    """
)


def measure(nums: str = "") -> list[Figure]:
    """Measure the numbers of ranks in ``nums``, with ``+`` between them."""
    figures = []
    for num in [int(each) for each in nums.split("+") if each] or NUMS:
        with kernel() as fresh:
            taken: Any = fresh.value(STEPS.format(num=num))
        for name, pairs in taken.items():
            seconds, processor = zip(*pairs, strict=True)
            used = statistics.median(processor)
            figures.append(
                Figure(
                    name=f"{name} ({num} ranks)",
                    unit="s",
                    ours=list(seconds),
                    limit=PROMISES.get(name, "") if num == NUMS[-1] else "",
                    note=f"{used:.3f} s of processor time" if used else "",
                )
            )
    return figures
