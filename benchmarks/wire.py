"""Checks that 10,000 events a second from each of 2 ranks arrive in order, and what they cost.

The ranks of a real cluster call ``ddpnb.log`` in a ``%%ddp`` cell with a live figure.  The same
cell without logging shows the processor time that the kernel uses anyway.
"""

import textwrap

from benchmarks.kernel import Kernel, kernel
from benchmarks.measure import Figure

SECONDS = 10
EVENTS_A_SECOND = 10_000
ROUNDS = 3

CELL = textwrap.dedent(
    """
    import time
    import ddpnb
    began = time.perf_counter()
    for i in range({seconds} * 1000):
        for _ in range({each}):
            ddpnb.log(loss=1.0 / (i + 1), samples=32)
        time.sleep(max(0.0, began + (i + 1) * 1e-3 - time.perf_counter()))
    """
)

CHECK = textwrap.dedent(
    """
    import json
    import numpy as np
    import ddpnb
    run = ddpnb.plot({name!r}).comparison.runs[0]
    events = run.events
    print(json.dumps({{
        "in order": all(
            np.array_equal(events["step"][events["rank"] == rank], np.arange({num}))
            for rank in (0, 1)
        ),
        "arrived": len(events),
    }}))
    """
)


def timed(running: Kernel, cell: str, name: str = "") -> float:
    """Return the share of a core that the kernel used while the cell ran."""
    running.run("import time; cpu, wall = time.process_time(), time.perf_counter()")
    running.run(f"%%ddp{f' --name {name}' if name else ''}\n{cell}")
    shard = "(time.process_time() - cpu) / (time.perf_counter() - wall)"
    return float(str(running.value(f"print({shard})")))


def measure() -> list[Figure]:
    each = EVENTS_A_SECOND // 1000
    logging = CELL.format(seconds=SECONDS, each=each)
    idle = CELL.format(seconds=SECONDS, each=0)
    ours, theirs, missing = [], [], []
    with kernel() as running:
        running.run("%load_ext ddpnb\n%ddp_start -n 2")
        for index in range(ROUNDS + 1):
            costs = timed(running, logging, f"wire-{index}"), timed(running, idle)
            found = running.value(CHECK.format(name=f"wire-{index}", num=SECONDS * EVENTS_A_SECOND))
            assert isinstance(found, dict)
            assert found["in order"], found
            if index:
                ours.append(costs[0])
                theirs.append(costs[1])
            missing.append(float(2 * SECONDS * EVENTS_A_SECOND - found["arrived"]))
        running.run("%ddp_stop")
    return [
        Figure(
            name="number of missing events (10,000 events per second from each of 2 ranks)",
            unit="events",
            ours=missing,
            limit="<= 0.0",
        ),
        Figure(
            name="share of a core that the kernel uses for these events, with drawing and storing",
            unit="",
            ours=[mine - none for mine, none in zip(ours, theirs, strict=True)],
            limit="<= 0.15",
            note=f"without logging: {theirs}",
        ),
    ]
