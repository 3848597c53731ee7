"""Measures the time that ``ddpnb.log`` takes on the training thread."""

import json
import re
import textwrap

from benchmarks.kernel import kernel
from benchmarks.measure import Figure

CELL = textwrap.dedent(
    """
    import json, time
    import ddpnb
    costs = []
    for i in range(2000):
        began = time.perf_counter()
        ddpnb.log(loss=0.5, samples=32)
        costs.append(1e6 * (time.perf_counter() - began))
        time.sleep(0.001)
    print("costs", json.dumps(costs))
    """
)


def measure() -> list[Figure]:
    with kernel() as running:
        running.run("%load_ext ddpnb\n%ddp_start -n 2")
        printed = running.run(f"%%ddp --name bench-log\n{CELL}")
        running.run("%ddp_stop")
    ours = [cost for found in re.findall(r"costs (\[.*?\])", printed) for cost in json.loads(found)]
    name = "time of one call of ddpnb.log on the training thread"
    return [Figure(name=name, unit="us", ours=ours, limit="<= 20.0")]
