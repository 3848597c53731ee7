"""How fast do variables cross?  ``push`` and ``pull`` against ipyparallel's, in the same kernel."""

import textwrap
from typing import Any

from benchmarks.cells import SETUP, STOP
from benchmarks.kernel import kernel
from benchmarks.measure import Figure

PAIRS = textwrap.dedent(
    """
    import numpy as np
    import ddpnb
    view = client[:]
    big = np.random.default_rng(0).random(100 * 2**20 // 8)

    def timed(call):
        began = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - began
        client.results.clear(), view.results.clear(), client.metadata.clear()
        client.history.clear(), view.history.clear()
        return seconds, result

    def in_turns(pairs, num_rounds):
        # each pair: a call, and what reads its result afterwards
        seconds = [[] for _ in pairs], [[] for _ in pairs]
        for _ in range(num_rounds + 2):
            for index, (call, read) in enumerate(pairs):
                taken, result = timed(call)
                reading, _ = timed(lambda: read(result))
                del result
                seconds[0][index].append(taken)
                seconds[1][index].append(taken + reading)
        print(json.dumps([[each[2:] for each in kind] for kind in seconds]))
    """
)

PUSH = """
in_turns([
    (lambda: ddpnb.push(big=big), lambda _: ddpnb.pull("big.sum()")),
    (lambda: view.push({"big": big}, block=True), lambda _: view.execute("big.sum()", block=True)),
], 10)
"""

PULL = """
in_turns([
    (lambda: ddpnb.pull("big"), lambda found: [array.sum() for array in found.values()]),
    (lambda: view.pull("big", block=True), lambda found: [array.sum() for array in found]),
], 10)
"""

PUSH_INT = """
in_turns([
    (lambda: ddpnb.push(x=1), lambda _: None),
    (lambda: view.push({"x": 1}, block=True), lambda _: None),
], 50)
"""

PULL_INT = """
in_turns([
    (lambda: ddpnb.pull("x"), lambda _: None),
    (lambda: view.pull("x", block=True), lambda _: None),
], 50)
"""


def measure() -> list[Figure]:
    with kernel() as running:
        running.run(SETUP)
        running.run(PAIRS)
        push, push_read = running.value(PUSH)
        pull, pull_read = running.value(PULL)
        push_int, _ = running.value(PUSH_INT)
        pull_int, _ = running.value(PULL_INT)
        running.run(STOP)
    return [
        figure("push of 100 MB to 2 ranks against ipyparallel's view.push", push, "<= 0.5"),
        figure("the same, and every number read once on the ranks", push_read),
        figure("pull of 100 MB from 2 ranks against ipyparallel's view.pull", pull, "<= 0.5"),
        figure("the same, and every number read once in the notebook", pull_read),
        figure("push of an int to 2 ranks against ipyparallel's view.push", push_int, in_ms=True),
        figure("pull of an int from 2 ranks against ipyparallel's view.pull", pull_int, in_ms=True),
    ]


def figure(name: str, seconds: Any, limit: str = "", *, in_ms: bool = False) -> Figure:
    scale, unit = (1e3, "ms") if in_ms else (1.0, "s")
    ours, theirs = ([scale * each for each in side] for side in seconds)
    return Figure(name=name, unit=unit, ours=ours, theirs=theirs, limit=limit)
