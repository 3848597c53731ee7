"""What does asking the ranks where they are cost a training?  Asked against not asked, in turns."""

import json
import re
import textwrap

from benchmarks.kernel import Kernel, kernel
from benchmarks.loop import LOOP
from benchmarks.measure import Figure, in_turns

SWITCH = textwrap.dedent(
    """
    %%local
    from ddpnb.notebook.cluster import stall
    stall.ASK_SECONDS = {seconds}
    """
).lstrip()
ASKED, NEVER = 0.5, 1e9

WINDOW_SECONDS = 2
NUM_WINDOWS = 60

TURNS = textwrap.dedent(
    f"""
    %%local
    import threading, time
    is_over = threading.Event()
    def take_turns():
        while not is_over.wait(0.02):
            is_asked = int(time.time() / {WINDOW_SECONDS}) % 2 == 0
            stall.ASK_SECONDS = {ASKED} if is_asked else {NEVER}
    threading.Thread(target=take_turns, daemon=True).start()
    """
).lstrip()
"""Asks in every other window of the clock: the same for the kernel and for the ranks."""

WINDOWS = textwrap.dedent(
    f"""
    from collections import Counter
    done, go_on = Counter(), torch.ones(1)
    end = time.time() + {WINDOW_SECONDS * (NUM_WINDOWS + 1)}
    while go_on.item():
        steps(1)
        done[int(time.time() / {WINDOW_SECONDS})] += 64 * dist.get_world_size()
        go_on.fill_(float(time.time() < end))
        dist.broadcast(go_on, 0)
    if rank == 0:
        whole = sorted(done)[1:-1]
        rates = [[done[n] / {WINDOW_SECONDS} for n in whole if n % 2 == k] for k in (0, 1)]
        print("windows", rates)
    """
)
CELL = "%%ddp\n" + LOOP[: LOOP.index("dist.barrier()")] + WINDOWS

COMPARE = textwrap.dedent(
    """
    %%local
    import json, ddpnb
    result = ddpnb.compare("ddp", task="synthetic", epochs=2, baseline=False, name="monitor")
    print()
    print(json.dumps(float(result.to_frame()["samples_per_second"].iloc[0])))
    """
).lstrip()


def cell_rates(running: Kernel) -> list[list[float]]:
    """Return the samples per second in windows with and without questions, of one cell."""
    running.run(SWITCH.format(seconds=ASKED))
    running.run(TURNS)
    printed = running.run(CELL)
    running.run("%%local\nis_over.set()")
    return list(json.loads(re.findall(r"windows (.*)", printed)[-1]))


def comparison_rate(running: Kernel, seconds: float) -> float:
    running.run(SWITCH.format(seconds=seconds))
    return float(json.loads(running.run(COMPARE).strip().splitlines()[-1]))


def measure() -> list[Figure]:
    with kernel() as running:
        running.run("%load_ext ddpnb\n%ddp_start -n 2")
        cell = cell_rates(running)
        comparison = in_turns(
            lambda: comparison_rate(running, ASKED), lambda: comparison_rate(running, NEVER), 9
        )
        running.run("%ddp_stop")
    return [
        Figure(
            name=f"ddp in {name}, 2 ranks, asked where they are against not asked",
            unit="samples/s",
            ours=ours,
            theirs=theirs,
            limit=">= 0.99",
        )
        for name, (ours, theirs) in (("a %%ddp cell", cell), ("a comparison", comparison))
    ]
