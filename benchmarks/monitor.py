"""What does asking the ranks where they are cost a training?  Asked against not asked, in turns."""

import json
import textwrap

from benchmarks.kernel import Kernel, kernel
from benchmarks.loop import LOOP, rate_in
from benchmarks.measure import Figure, in_turns

SWITCH = textwrap.dedent(
    """
    %%local
    from ddpnb.notebook.cluster import stall
    stall.ASK_SECONDS = {seconds}
    """
).lstrip()
ASKED, NEVER = 0.5, 1e9

COMPARE = textwrap.dedent(
    """
    %%local
    import json, ddpnb
    result = ddpnb.compare("ddp", task="synthetic", epochs=2, baseline=False, name="monitor")
    print()
    print(json.dumps(float(result.to_frame()["samples_per_second"].iloc[0])))
    """
).lstrip()


def cell_rate(running: Kernel, seconds: float) -> float:
    running.run(SWITCH.format(seconds=seconds))
    return rate_in(running.run(f"%%ddp\n{LOOP}"))


def comparison_rate(running: Kernel, seconds: float) -> float:
    running.run(SWITCH.format(seconds=seconds))
    return float(json.loads(running.run(COMPARE).strip().splitlines()[-1]))


def measure() -> list[Figure]:
    figures = []
    with kernel() as running:
        running.run("%load_ext ddpnb\n%ddp_start -n 2")
        for name, rate in (("a %%ddp cell", cell_rate), ("a comparison", comparison_rate)):
            ours, theirs = in_turns(
                lambda rate=rate: rate(running, ASKED), lambda rate=rate: rate(running, NEVER), 7
            )
            figures.append(
                Figure(
                    name=f"ddp in {name}, 2 ranks, asked where they are against not asked",
                    unit="samples/s",
                    ours=ours,
                    theirs=theirs,
                    limit=">= 0.99",
                )
            )
        running.run("%ddp_stop")
    return figures
